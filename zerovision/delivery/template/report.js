// Theme, copying, reading charts, toggling lines, sorting, reading matrices, enlarging pictures, live reload.
"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const announce = (text) => { document.getElementById("spoken").textContent = text; };
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  // Storage may be forbidden for pages from a file.
  const save = (store, key, value) => { try { window[store].setItem(key, value); } catch { /* not remembered */ } };
  const load = (store, key) => { try { return window[store].getItem(key); } catch { return null; } };
  const make = (tag, className, parent) => {
    const element = document.createElement(tag);
    element.className = className;
    parent.append(element);
    return element;
  };
  const wrapInButton = (parent) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...parent.childNodes);
    parent.append(button);
    return button;
  };

  function addTheme() {
    const names = ["system", "light", "dark"];
    const button = document.getElementById("theme");
    const apply = (name) => {
      if (name === "system") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = name;
      button.textContent = `Theme: ${name}`;
    };
    let current = Math.max(names.indexOf(load("localStorage", "zerovision-theme")), 0);
    apply(names[current]);
    button.hidden = false;
    button.addEventListener("click", () => {
      current = (current + 1) % names.length;
      apply(names[current]);
      save("localStorage", "zerovision-theme", names[current]);
      announce(`Theme: ${names[current]}`);
    });
  }

  function addCopyButtons() {
    for (const button of all("button[data-copy]")) {
      button.hidden = false;
      button.addEventListener("click", async () => {
        const code = document.getElementById(button.dataset.copy);
        try {
          await navigator.clipboard.writeText(code.textContent);
        } catch { // not allowed for pages from a file in some browsers
          getSelection().selectAllChildren(code);
          document.execCommand("copy");
        }
        announce("The command was copied.");
        const label = button.firstChild;
        label.textContent = "Copied";
        setTimeout(() => { label.textContent = "Copy"; }, 2000);
      });
    }
  }

  function format(value, isPercent) {
    if (isPercent) return `${(100 * value).toFixed(2)} %`;
    if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(3);
    return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 }).replaceAll(",", "\u202f");
  }

  function addCursor(figure) {
    const chart = DATA.charts[figure.dataset.chart];
    const canvas = figure.querySelector(".canvas"), readout = figure.querySelector(".readout");
    const places = [...new Set(chart.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const cursor = make("div", "cursor", canvas);
    const dots = chart.lines.map((line) => {
      const dot = make("div", "dot", canvas);
      dot.style.setProperty("--dot", `var(--c${line.style})`);
      return dot;
    });
    const place = (isLog, [low, high]) => {
      const scale = isLog ? Math.log : (value) => value;
      return (value) => 100 * (scale(value) - scale(low)) / (scale(high) - scale(low));
    };
    const left = place(chart.xLog, chart.x), bottom = place(chart.log, chart.y);
    const isOff = (line) => figure.querySelector(`g[data-switch="${CSS.escape(line.switch)}"]`).classList.contains("off");
    let at = -1;
    const hide = () => { for (const part of [cursor, readout, ...dots]) part.hidden = true; };
    const show = (position) => {
      at = clamp(position, 0, places.length - 1);
      const x = places[at], texts = [`${chart.xName} ${format(x, false)}`];
      chart.lines.forEach((line, number) => {
        const last = line.x.findLastIndex((place) => place <= x), value = line.y[last] ?? null;
        dots[number].hidden = value === null || isOff(line);
        if (dots[number].hidden) return;
        dots[number].style.left = `${left(line.x[last])}%`;
        dots[number].style.bottom = `${bottom(value)}%`;
        texts.push(`${line.name} ${format(value, chart.percent)}`);
      });
      cursor.hidden = readout.hidden = false;
      cursor.style.left = `${left(x)}%`;
      readout.textContent = texts.join("\n");
      readout.style.left = left(x) < 50 ? `calc(${left(x)}% + 10px)` : "auto";
      readout.style.right = left(x) < 50 ? "auto" : `calc(${100 - left(x)}% + 10px)`;
      canvas.setAttribute("aria-valuenow", at + 1);
      canvas.setAttribute("aria-valuetext", texts.join(", "));
    };
    hide();
    // Screen readers pass the arrow keys to a slider, and speak its value text.
    for (const [name, value] of Object.entries({
      role: "slider", tabindex: "0", "aria-label": `${figure.querySelector("h3, h4").textContent}: read values`,
      "aria-valuemin": 1, "aria-valuemax": places.length, "aria-valuenow": places.length,
      "aria-valuetext": "use the arrow keys", "aria-describedby": figure.querySelector("figcaption").id,
    })) canvas.setAttribute(name, value);
    const far = Math.max(Math.round(places.length / 10), 1);
    const steps = {
      ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: far, PageDown: -far, Home: -Infinity, End: Infinity,
    };
    canvas.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { hide(); return; }
      if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      show((at < 0 ? places.length : at) + steps[event.key]);
      announce(canvas.getAttribute("aria-valuetext"));
    });
    const follow = (event) => {
      const box = canvas.getBoundingClientRect();
      const wanted = 100 * (event.clientX - box.left) / box.width;
      const distances = places.map((x) => Math.abs(left(x) - wanted));
      show(distances.indexOf(Math.min(...distances)));
    };
    canvas.addEventListener("pointermove", follow);
    canvas.addEventListener("pointerdown", follow);
    canvas.addEventListener("pointerleave", () => { if (document.activeElement !== canvas) hide(); });
    canvas.addEventListener("blur", hide);
    figure.addEventListener("lines-toggled", () => { if (!cursor.hidden) show(at); });
  }

  // In a comparison the legend toggles a run in the whole page; in the page of one run, a line in its chart.
  function addLegends() {
    for (const item of all(".legend li")) {
      const key = item.dataset.switch, button = wrapInButton(item);
      const scope = /^run\d+$/.test(key) ? document : item.closest("figure");
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const isOn = button.getAttribute("aria-pressed") !== "true";
        for (const part of all(`[data-switch="${CSS.escape(key)}"]`, scope)) {
          if (part.tagName === "LI") part.firstElementChild.setAttribute("aria-pressed", isOn);
          else if (part.tagName === "g") part.classList.toggle("off", !isOn);
          else part.hidden = !isOn;
        }
        for (const chart of all("figure.chart")) chart.dispatchEvent(new Event("lines-toggled"));
        announce(`${button.textContent.trim()} ${isOn ? "shown" : "hidden"}`);
      });
    }
  }

  function addSorting() {
    const valueOf = (row, column) => {
      const cell = row.cells[column], text = cell.dataset.value ?? cell.textContent.trim();
      const value = parseFloat(text.replace(/[\s\u202f%]/g, ""));
      return cell.tagName === "TD" && !Number.isNaN(value) ? value : text;
    };
    const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b
      : String(a).localeCompare(String(b), undefined, { numeric: true }));
    for (const table of all("table.sortable")) {
      const heads = all("thead th", table);
      heads.forEach((head, column) => {
        const button = wrapInButton(head);
        button.addEventListener("click", () => {
          const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
          for (const other of heads) other.removeAttribute("aria-sort");
          head.setAttribute("aria-sort", order);
          const sign = order === "ascending" ? 1 : -1;
          const rows = [...table.tBodies[0].rows];
          rows.sort((a, b) => sign * compare(valueOf(a, column), valueOf(b, column)));
          table.tBodies[0].append(...rows);
          announce(`Sorted by ${button.textContent}, ${order}`);
        });
      });
    }
  }

  function addMatrixKeys() {
    for (const matrix of all("table.matrix")) {
      const rows = [...matrix.tBodies[0].rows], readout = document.getElementById(`${matrix.id}-readout`);
      const cell = (row, column) => rows[row].cells[column + 1];
      const names = rows.map((row) => row.cells[0].textContent);
      const supports = rows.map((row) => [...row.cells].slice(1).reduce((sum, one) => sum + Number(one.textContent), 0));
      const size = rows.length;
      let at = [0, 0];
      const show = (row, column) => {
        cell(...at).tabIndex = -1;
        cell(...at).classList.remove("here");
        at = [clamp(row, 0, size - 1), clamp(column, 0, size - 1)];
        const here = cell(...at), samples = Number(here.textContent), support = supports[at[0]];
        here.tabIndex = 0;
        here.classList.add("here");
        const share = support ? ` (${(100 * samples / support).toFixed(1)} %)` : "";
        readout.textContent = `True ${names[at[0]]}, predicted ${names[at[1]]}: ${samples} of ${support}${share}`;
      };
      cell(0, 0).tabIndex = 0;
      readout.hidden = false;
      readout.textContent = "Point at a cell, or focus the matrix and use the arrow keys.";
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -size], End: [0, size] };
      matrix.addEventListener("keydown", (event) => {
        if (!(event.key in moves)) return;
        event.preventDefault();
        show(at[0] + moves[event.key][0], at[1] + moves[event.key][1]);
        cell(...at).focus();
      });
      const take = (event) => {
        const here = event.target.closest("tbody td");
        if (here) show(here.parentElement.sectionRowIndex, here.cellIndex - 1);
      };
      for (const type of ["focusin", "pointerover", "click"]) matrix.addEventListener(type, take);
    }
  }

  // Only what can be scrolled is a tab stop.
  function trimTabStops() {
    const observer = new ResizeObserver((entries) => {
      for (const { target } of entries) target.tabIndex = target.scrollWidth > target.clientWidth ? 0 : -1;
    });
    all(".scroll").forEach((part) => observer.observe(part));
  }

  // A picture opens large, beside what counted in it.
  function addZoom() {
    const items = all(".images li").filter((item) => item.querySelector("img"));
    const dialog = make("dialog", "zoom", document.body);
    dialog.setAttribute("aria-live", "polite");
    dialog.setAttribute("aria-label", "Picture");
    let at = 0;
    const show = (place) => {
      at = clamp(place, 0, items.length - 1);
      dialog.replaceChildren(...all("img, .classes, small", items[at]).map((one) => one.cloneNode(true)));
      const close = make("button", "", dialog);
      close.textContent = "Close";
      close.addEventListener("click", () => dialog.close());
      close.focus();
    };
    items.forEach((item, place) => {
      wrapInButton(item.querySelector(".pictures")).addEventListener("click", () => { dialog.showModal(); show(place); });
    });
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    dialog.addEventListener("keydown", (event) => {
      if (!(event.key in steps)) return;
      event.preventDefault();
      show(at + steps[event.key]);
    });
    dialog.addEventListener("close", () => items[at].querySelector("button").focus());
  }

  // While a run trains, the page reloads itself, and restores scroll position, focus and open parts.
  function reloadWhileLive() {
    const key = `zerovision-live-${location.pathname}`;
    const before = JSON.parse(load("sessionStorage", key) ?? "null");
    if (before) {
      for (const [id, isOpen] of before.details) { const one = document.getElementById(id); if (one) one.open = isOpen; }
      if (before.focus) document.getElementById(before.focus)?.focus({ preventScroll: true });
      scrollTo({ top: before.top, behavior: "instant" });
    }
    try { sessionStorage.removeItem(key); } catch { /* nothing was stored */ }
    if (!DATA.reloadSeconds) return;
    const button = document.getElementById("pause");
    let isPaused = before?.isPaused ?? false;
    const label = () => { button.textContent = isPaused ? "Live: resume" : "Live: pause"; };
    label();
    button.hidden = false;
    button.addEventListener("click", () => { isPaused = !isPaused; label(); announce(isPaused ? "Paused" : "Live"); });
    setInterval(() => {
      if (isPaused || document.hidden) return;
      save("sessionStorage", key, JSON.stringify({
        top: scrollY, isPaused, focus: document.activeElement?.id,
        details: all("details").map((one) => [one.id, one.open]),
      }));
      location.reload();
    }, 1000 * DATA.reloadSeconds);
  }

  addTheme();
  addCopyButtons();
  addLegends();
  all("figure.chart").forEach(addCursor);
  addSorting();
  addMatrixKeys();
  addZoom();
  trimTabStops();
  all(".hint").forEach((hint) => { hint.hidden = false; });
  reloadWhileLive();
})();
