  // The film: one trace for each shade of lines, then the boxes. A frame moves lines between the shades.
  const plotOf = (name) => document.querySelector(`#plot-${name}.js-plotly-plot, #plot-${name} .js-plotly-plot`);

  // Show the frame that a slider's value names; returns its number and its words.
  function showFrame(frames, value) {
    const { lines, levels, shades, seconds, words } = frames;
    const at = Math.max(0, Math.min(Number(value) || 0, levels.length - 1));
    const cluster = plotOf("cluster"), loads = plotOf("loads");
    if (cluster && cluster.data && cluster.data.length === shades.length + 1) {
      const x = shades.map(() => []), y = shades.map(() => []);
      lines.forEach(([x0, y0, x1, y1], number) => {
        const level = Number(levels[at][number]);
        x[level].push(x0, x1, null);
        y[level].push(y0, y1, null);
      });
      const places = shades.map((_, level) => level);
      window.Plotly.restyle(cluster, { x, y }, places);
      const boxes = cluster.data[shades.length], own = levels[at].slice(lines.length);
      const edges = [...own].map((digit) => (digit === "0" ? "rgba(0,0,0,0)" : shades[Number(digit)]));
      const widths = [...own].map((digit) => (digit === "0" ? 0 : 2 + Number(digit) / 2));
      if (boxes) window.Plotly.restyle(cluster, { "marker.line.color": [edges], "marker.line.width": [widths] }, [shades.length]);
    }
    if (loads && loads.layout && loads.layout.shapes) {
      window.Plotly.relayout(loads, { "shapes[0].x0": seconds[at], "shapes[0].x1": seconds[at] });
    }
    return [at, words[at]];
  }

  let playing = null;
  function stop() {
    clearInterval(playing);
    playing = null;
    const button = document.getElementById("play");
    if (button) button.textContent = "Play";
  }

  // `go` turns the slider to a frame.
  function play(button, go) {
    if (playing) return stop();
    button.textContent = "Stop";
    playing = setInterval(() => {
      const place = document.getElementById("frame");
      if (!place) return stop();
      const last = Number(place.max), now = Number(place.value);
      go(now >= last ? 0 : now + 1);
      if (now + 1 >= last) stop();
    }, 120);
  }
