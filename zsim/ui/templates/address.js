  // The page's state is the part of its address after "#": each setting that is not as at the start, by its key,
  // and each pinned setting, written the same way, as "pin", and the key and name of a recording. A server never sees it.
  const APPLIED = "zsim-applied";
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
    // Any page may have linked here: other settings, a pin's too, are shown and wait for a click.
    const free = [more, ...pins.map((pin) => pin.more)].filter((lines) => lines.trim()).join("\n");
    const isHeld = free !== "" && sessionStorage.getItem(APPLIED) !== free;
    const lines = isHeld ? free : more;
    const places = {
      ...byId, more: lines, applied: isHeld ? "" : more, pins: isHeld ? [] : pins,
      held: isHeld ? { more, pins, free } : null, recording,
      // A list empties itself of a name that it does not have.
      named: Object.fromEntries([...found].filter(([key]) => key in initial)),
    };
    return window.dash_clientside.callback_context.outputs_list.map((output) => places[output.id] ?? null);
  }

  // The lines of the other settings count from here on. What the address brought counts as it came, pins too,
  // if nobody changed it meanwhile.
  function apply(clicks, more, pins, held) {
    const isWhole = held && more === held.free;
    if (!clicks) return [nothing(), nothing(), nothing()];
    return [isWhole ? held.more : more ?? "", isWhole ? held.pins : nothing(), null];
  }

  function remember(asked, pins, recording, initial) {
    if (!asked) return nothing();
    const found = words(asked, initial);
    for (const pin of pins ?? []) found.append("pin", words(pin, initial).toString());
    if (recording) found.append("recording", recording.key + "/" + recording.name);
    const free = [asked.more, ...(pins ?? []).map((pin) => pin.more)].filter((lines) => lines.trim()).join("\n");
    sessionStorage.setItem(APPLIED, free); // a reload of this tab applies again what was applied here
    const text = found.toString();
    history.replaceState(history.state, "", text ? "#" + text : location.pathname);
    return text;
  }
