"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paper = { text: "#000000", grid: "#dddddd", card: "#ffffff", line: "#cccccc", soft: "#444444" };
  const printWidth = 680;

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
  const plots = [];
  for (const source of document.querySelectorAll("script[data-plot]")) {
    const place = document.getElementById(source.dataset.plot);
    const figure = JSON.parse(source.textContent);
    place.style.minHeight = figure.layout.height + "px";
    plots.push({ place, figure });
  }

  function repaint(is, size) {
    for (const { place } of plots) {
      if (place.layout) Plotly.relayout(place, { ...painted(place.layout, is), ...size });
    }
  }

  async function draw() {
    for (const { place, figure } of plots) {
      await Plotly.newPlot(place, figure.data, assign(figure.layout, painted(figure.layout, colours())), config);
      await new Promise((resume) => setTimeout(resume));
    }
    document.documentElement.dataset.drawn = plots.length;
  }

  for (const button of document.querySelectorAll("button[data-start]")) {
    const range = [Number(button.dataset.start), Number(button.dataset.end)];
    button.addEventListener("click", () => Plotly.relayout(button.dataset.plot, { "xaxis.range": range }));
  }
  dark.addEventListener("change", () => repaint(colours(), {}));
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
    repaint(paper, { width: printWidth });
  });
  addEventListener("afterprint", () => repaint(colours(), { width: null, autosize: true }));
  draw();
})();
