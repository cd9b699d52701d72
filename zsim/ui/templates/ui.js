"use strict";
(() => {
  {% include "paint.js" %}

  const nothing = () => window.dash_clientside.no_update;
  const nameOf = (output) => output.id.replace(/^(plot|box|card)-/, "");

  {% include "address.js" %}

  {% include "film.js" %}

  function frame(value, film) {
    return film && film.frames ? showFrame(film.frames, value) : [nothing(), nothing()];
  }

  // On a phone names would stand on each other: every fourth box keeps its own.
  const thinned = (data) => innerWidth > 640 ? data : data.map((trace) => !Array.isArray(trace.text) || trace.mode !== "markers+text"
    ? trace : { ...trace, text: trace.text.map((text, number) => (number % 4 ? "" : text)) });

  function ready(figure) {
    return { data: thinned(figure.data), layout: assign(structuredClone(figure.layout), painted(figure.layout, colours())) };
  }

  // The next picture on the screen; a page in the background draws none, and waits no longer for it.
  const painting = () => new Promise((done) => {
    requestAnimationFrame(() => setTimeout(done));
    setTimeout(done, 200);
  });

  // Figures into their places, once the answer's words stand there; a place without a figure is hidden.
  async function draw(figures) {
    const outputs = window.dash_clientside.callback_context.outputs_list;
    if (!figures) return outputs.map(nothing);
    await painting();
    return outputs.map((output) => {
      const figure = figures[nameOf(output)];
      if (output.property === "hidden") return !figure;
      if (!figure) return nothing();
      return output.property === "style" ? { height: figure.layout.height + "px" } : ready(figure);
    });
  }

  function cards(figures) {
    const outputs = window.dash_clientside.callback_context.outputs_list;
    return outputs.map((output) => !(figures && figures["waterfall-" + nameOf(output)]));
  }

  // Which point of the scaling curve to ask for: one more than there are, once, while nothing else runs and
  // nobody has just turned a setting.
  let quietSince = 0;
  function next(tick, asked, mode, curve, wanted) {
    if (!asked || document.getElementById("shell").className === "busy") quietSince = performance.now();
    if (performance.now() - quietSince < 1000) return nothing();
    const isOf = (what) => what && what.token === asked.token && what.mode === mode;
    const done = curve && isOf(curve.done) ? curve.done.number : 0;
    if (done >= asked.counts.length || (isOf(wanted) && wanted.number > done)) return nothing();
    return { token: asked.token, mode, number: done + 1 };
  }

  window.dash_clientside = Object.assign({}, window.dash_clientside, { zsim: { draw, cards, next, restore, apply, remember, frame } });

  // Dash takes a number at Enter, and when its field is left; who stops typing need do neither.
  const typed = 400; // milliseconds after the last key press
  let typing;
  document.addEventListener("input", (event) => {
    if (!event.target.matches("#settings input[type=number]")) return;
    clearTimeout(typing);
    typing = setTimeout(() => event.target.dispatchEvent(new FocusEvent("focusout", { bubbles: true })), typed);
  });
  document.addEventListener("click", async (event) => {
    if (event.target.id === "skip") {
      event.preventDefault();
      document.getElementById("main").focus();
      document.getElementById("main").scrollIntoView();
    }
    if (event.target.id !== "share") return;
    await navigator.clipboard.writeText(location.href);
    event.target.textContent = "Link copied";
    setTimeout(() => { event.target.textContent = "Copy link"; }, 2000);
  });
  document.addEventListener("click", (event) => {
    if (event.target.id === "play") play(event.target, (value) => window.dash_clientside.set_props("frame", { value }));
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-start]");
    if (!button) return;
    const place = document.querySelector(`#${button.dataset.plot} .js-plotly-plot`);
    window.Plotly.relayout(place, { "xaxis.range": [Number(button.dataset.start), Number(button.dataset.end)] });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const place of document.querySelectorAll(".js-plotly-plot")) {
      if (place.layout) window.Plotly.relayout(place, painted(place.layout, colours()));
    }
  });
})();
