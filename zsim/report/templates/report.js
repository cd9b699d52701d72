"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paper = { text: "#000000", grid: "#dddddd", card: "#ffffff", line: "#cccccc", soft: "#444444" };
  const printWidth = 680;

  {% include "paint.js" %}

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

  // plotly.js, which the page holds gzipped.
  async function unpack() {
    const bytes = Uint8Array.from(atob(document.getElementById("plotly").textContent), (letter) => letter.charCodeAt(0));
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(script);
  }

  async function draw() {
    await unpack();
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
