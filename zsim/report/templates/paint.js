  function colours() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    return { text: read("--text"), grid: read("--grid"), card: read("--card"), line: read("--line"), soft: read("--soft") };
  }

  // What the figures leave to the page: text, grid and hover boxes.
  function painted(layout, is) {
    const changes = {
      "font.color": is.text, "hoverlabel.bgcolor": is.card, "hoverlabel.bordercolor": is.line,
      "hoverlabel.font.color": is.text, "legend.bgcolor": "rgba(0,0,0,0)",
      "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": is.soft, "modebar.activecolor": is.text,
    };
    for (const key of Object.keys(layout)) {
      if (/^[xy]axis/.test(key)) {
        changes[key + ".gridcolor"] = is.grid;
        changes[key + ".zerolinecolor"] = is.line;
        changes[key + ".linecolor"] = is.line;
        changes[key + ".tickcolor"] = is.line;
      }
    }
    return changes;
  }

  function assign(layout, changes) {
    for (const [path, value] of Object.entries(changes)) {
      const keys = path.split(".");
      const last = keys.pop();
      let node = layout;
      for (const key of keys) node = node[key] ??= {};
      node[last] = value;
    }
    return layout;
  }

  // An explicit list: plotly.js's own has a button that uploads the figure.
  const buttons = ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"];
  const config = { responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtons: [buttons] };
