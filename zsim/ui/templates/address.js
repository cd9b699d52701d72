  // The page's state is the part of its address after "#": each setting that is not as at the start, by its key,
  // and each pinned setting, written the same way, as "pin", and the key and name of a recording. A server never sees it.
  const words = (setting, initial) => {
    const found = new URLSearchParams();
    for (const [key, value] of Object.entries(setting.shown)) {
      if (String(value ?? "") !== String(initial[key] ?? "")) found.append(key, value ?? "");
    }
    if (setting.more) found.append("more", setting.more);
    return found;
  };

  function settingOf(found, initial) {
    const shown = Object.fromEntries(Object.entries(initial).map(([key, value]) => {
      if (!found.has(key)) return [key, value];
      const text = found.get(key);
      const isNumber = document.querySelector(`input#field-${CSS.escape(key.replaceAll(".", "-"))}`) !== null;
      return [key, isNumber ? (text === "" || isNaN(text) ? null : Number(text)) : text];
    }));
    return { shown, more: found.get("more") ?? "" };
  }

  function restore(hash, initial) {
    const found = new URLSearchParams((hash || "").replace(/^#/, ""));
    const { shown, more } = settingOf(found, initial);
    const byId = Object.fromEntries(Object.entries(shown).map(([key, v]) => ["field-" + key.replaceAll(".", "-"), v]));
    const pins = found.getAll("pin").map((pin) => settingOf(new URLSearchParams(pin), initial));
    const [key, ...name] = (found.get("recording") ?? "").split("/");
    const recording = key ? { key, name: name.join("/") } : null;
    const places = { ...byId, more, pins, recording };
    return window.dash_clientside.callback_context.outputs_list.map((output) => places[output.id] ?? null);
  }

  function remember(asked, pins, recording, initial) {
    if (!asked) return nothing();
    const found = words(asked, initial);
    for (const pin of pins ?? []) found.append("pin", words(pin, initial).toString());
    if (recording) found.append("recording", recording.key + "/" + recording.name);
    const text = found.toString();
    history.replaceState(history.state, "", text ? "#" + text : location.pathname);
    return text;
  }
