// What the page can do beyond being read: theme, copying, reading charts, switching lines, sorting, the live reload.
"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const say = (words) => { document.getElementById("spoken").textContent = words; };
  // Storage may be forbidden for pages from a file.
  const keep = (store, key, value) => { try { window[store].setItem(key, value); } catch { /* not remembered */ } };
  const kept = (store, key) => { try { return window[store].getItem(key); } catch { return null; } };
  const make = (tag, className, parent) => {
    const element = document.createElement(tag);
    element.className = className;
    parent.append(element);
    return element;
  };

  function chooseTheme() {
    const names = ["system", "light", "dark"];
    const button = document.getElementById("theme");
    const apply = (name) => {
      if (name === "system") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = name;
      button.textContent = `Theme: ${name}`;
    };
    let current = Math.max(names.indexOf(kept("localStorage", "zerovision-theme")), 0);
    apply(names[current]);
    button.hidden = false;
    button.addEventListener("click", () => {
      current = (current + 1) % names.length;
      apply(names[current]);
      keep("localStorage", "zerovision-theme", names[current]);
      say(`Theme: ${names[current]}`);
    });
  }

  function copyCommands() {
    for (const button of all("button[data-copy]")) {
      button.hidden = false;
      button.addEventListener("click", async () => {
        const code = document.getElementById(button.dataset.copy);
        try {
          await navigator.clipboard.writeText(code.textContent);
        } catch { // not allowed here: the older way
          getSelection().selectAllChildren(code);
          document.execCommand("copy");
        }
        say("The command was copied.");
        const label = button.firstChild;
        label.textContent = "Copied";
        setTimeout(() => { label.textContent = "Copy"; }, 2000);
      });
    }
  }

  function write(value, isPercent) {
    if (isPercent) return `${(100 * value).toFixed(2)} %`;
    if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(3);
    return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 }).replaceAll(",", "\u202f");
  }

  // Returns the position of the last of the ascending numbers that is not above the value, -1 for none.
  function lastUpTo(numbers, value) {
    let low = 0, high = numbers.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (numbers[middle] <= value) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  function readChart(figure) {
    const chart = DATA.charts[figure.dataset.chart];
    const canvas = figure.querySelector(".canvas"), reading = figure.querySelector(".reading");
    const places = [...new Set(chart.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const cursor = make("div", "cursor", canvas);
    const dots = chart.lines.map((line) => {
      const dot = make("div", "dot", canvas);
      dot.style.setProperty("--dot", `var(--c${line.style})`);
      return dot;
    });
    const across = (x) => (x - chart.x[0]) / (chart.x[1] - chart.x[0]);
    const scale = chart.log ? Math.log : (value) => value;
    const up = (y) => (scale(y) - scale(chart.y[0])) / (scale(chart.y[1]) - scale(chart.y[0]));
    const isOff = (line) => figure.querySelector(`g[data-switch="${CSS.escape(line.switch)}"]`).classList.contains("off");
    let at = -1;
    const hide = () => { for (const part of [cursor, reading, ...dots]) part.hidden = true; };
    const show = (position) => {
      at = Math.min(Math.max(position, 0), places.length - 1);
      const words = [];
      cursor.hidden = false;
      cursor.style.left = `${100 * across(places[at])}%`;
      chart.lines.forEach((line, number) => {
        const last = lastUpTo(line.x, places[at]);
        const value = last < 0 ? null : line.y[last];
        dots[number].hidden = value === null || isOff(line);
        if (dots[number].hidden) return;
        dots[number].style.left = `${100 * across(line.x[last])}%`;
        dots[number].style.bottom = `${100 * up(value)}%`;
        words.push(`${line.name} ${write(value, chart.percent)}`);
      });
      reading.textContent = [`${chart.xName} ${write(places[at], false)}`, ...words].join("\n");
      reading.hidden = false;
      const isLeft = across(places[at]) < 0.5;
      reading.style.left = isLeft ? `calc(${100 * across(places[at])}% + 10px)` : "auto";
      reading.style.right = isLeft ? "auto" : `calc(${100 - 100 * across(places[at])}% + 10px)`;
      canvas.setAttribute("aria-valuenow", at + 1);
      canvas.setAttribute("aria-valuetext", reading.textContent.replaceAll("\n", ", "));
    };
    hide();
    // A slider is what screen readers hand the arrow keys to; they speak its value text.
    const title = figure.querySelector("h3, h4");
    for (const [name, value] of Object.entries({
      role: "slider", tabindex: "0", "aria-label": `${title.textContent}: read values`, "aria-valuemin": 1,
      "aria-valuemax": places.length, "aria-valuenow": places.length, "aria-valuetext": "use the arrow keys",
      "aria-describedby": figure.querySelector("figcaption").id,
    })) canvas.setAttribute(name, value);
    const far = Math.max(Math.round(places.length / 10), 1);
    const moves = {
      ArrowRight: () => at + 1, ArrowUp: () => at + 1, ArrowLeft: () => at - 1, ArrowDown: () => at - 1,
      PageUp: () => at + far, PageDown: () => at - far, Home: () => 0, End: () => places.length - 1,
    };
    canvas.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { hide(); return; }
      if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      show(at < 0 && event.key !== "Home" ? places.length - 1 : moves[event.key]());
      say(canvas.getAttribute("aria-valuetext"));
    });
    const follow = (event) => {
      const box = canvas.getBoundingClientRect();
      const wanted = chart.x[0] + (event.clientX - box.left) / box.width * (chart.x[1] - chart.x[0]);
      const before = Math.max(lastUpTo(places, wanted), 0), after = Math.min(before + 1, places.length - 1);
      show(wanted - places[before] <= places[after] - wanted ? before : after);
    };
    canvas.addEventListener("pointermove", follow);
    canvas.addEventListener("pointerdown", follow);
    canvas.addEventListener("pointerleave", () => { if (document.activeElement !== canvas) hide(); });
    canvas.addEventListener("blur", hide);
    figure.addEventListener("lines-switched", () => { if (!cursor.hidden) show(at); });
  }

  // In a comparison a run is switched everywhere; in the page of one run, a line in its chart.
  function switchLines() {
    for (const item of all(".legend li")) {
      const key = item.dataset.switch, figure = item.closest("figure");
      const scope = () => (/^run\d+$/.test(key) ? document : figure);
      const button = document.createElement("button");
      button.type = "button";
      button.append(...item.childNodes);
      button.setAttribute("aria-pressed", "true");
      item.append(button);
      button.addEventListener("click", () => {
        const isOn = button.getAttribute("aria-pressed") !== "true";
        for (const part of all(`[data-switch="${CSS.escape(key)}"]`, scope())) {
          if (part.tagName === "LI") part.firstElementChild.setAttribute("aria-pressed", isOn);
          else if (part.tagName === "g") { part.classList.toggle("off", !isOn); part.style.display = isOn ? "" : "none"; }
          else part.hidden = !isOn;
        }
        for (const chart of scope() === document ? all("figure.chart") : [figure]) chart.dispatchEvent(new Event("lines-switched"));
        say(`${button.textContent.trim()} ${isOn ? "shown" : "hidden"}`);
      });
    }
  }

  function sortTables() {
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
        const button = document.createElement("button");
        button.type = "button";
        button.append(...head.childNodes);
        head.append(button);
        button.addEventListener("click", () => {
          const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
          for (const other of heads) other.removeAttribute("aria-sort");
          head.setAttribute("aria-sort", order);
          const sign = order === "ascending" ? 1 : -1;
          const rows = [...table.tBodies[0].rows];
          rows.sort((a, b) => sign * compare(valueOf(a, column), valueOf(b, column)));
          table.tBodies[0].append(...rows);
          say(`Sorted by ${button.textContent}, ${order}`);
        });
      });
    }
  }

  function readMatrices() {
    for (const matrix of all("table.matrix")) {
      const rows = [...matrix.tBodies[0].rows], reading = document.getElementById(`${matrix.id}-reading`);
      const cell = (row, column) => rows[row].cells[column + 1];
      const names = rows.map((row) => row.cells[0].textContent);
      const supports = rows.map((row) => [...row.cells].slice(1).reduce((sum, one) => sum + Number(one.textContent), 0));
      const size = rows.length;
      let at = [0, 0];
      const show = (row, column) => {
        cell(...at).tabIndex = -1;
        all(".here", matrix).forEach((one) => one.classList.remove("here"));
        at = [Math.min(Math.max(row, 0), size - 1), Math.min(Math.max(column, 0), size - 1)];
        const here = cell(...at), samples = Number(here.textContent);
        here.tabIndex = 0;
        here.classList.add("here");
        const share = supports[at[0]] ? ` (${(100 * samples / supports[at[0]]).toFixed(1)} %)` : "";
        reading.textContent = `True ${names[at[0]]}, predicted ${names[at[1]]}: ${samples} of ${supports[at[0]]}${share}`;
      };
      cell(0, 0).tabIndex = 0;
      reading.hidden = false;
      reading.textContent = "Point at a cell, or focus the matrix and use the arrow keys.";
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
      matrix.addEventListener("focusin", take);
      matrix.addEventListener("pointerover", take);
      matrix.addEventListener("click", take);
    }
  }

  // Only what can be scrolled is a stop on the way through the page.
  function trimStops() {
    const observer = new ResizeObserver((entries) => {
      for (const { target } of entries) target.tabIndex = target.scrollWidth > target.clientWidth ? 0 : -1;
    });
    all(".scroll").forEach((part) => observer.observe(part));
  }

  // While the run goes on the page loads itself again, and goes back to where the reader was.
  function reloadWhileLive() {
    const key = `zerovision-live-${location.pathname}`;
    const before = JSON.parse(kept("sessionStorage", key) ?? "null");
    if (before) {
      for (const [id, isOpen] of before.details) { const one = document.getElementById(id); if (one) one.open = isOpen; }
      if (before.focus) document.getElementById(before.focus)?.focus({ preventScroll: true });
      scrollTo({ top: before.top, behavior: "instant" });
    }
    try { sessionStorage.removeItem(key); } catch { /* nothing was kept */ }
    if (!DATA.reloadSeconds) return;
    const button = document.getElementById("pause");
    let isPaused = before?.isPaused ?? false;
    const label = () => { button.textContent = isPaused ? "Live: go on" : "Live: pause"; };
    label();
    button.hidden = false;
    button.addEventListener("click", () => { isPaused = !isPaused; label(); say(isPaused ? "Paused" : "Live"); });
    setInterval(() => {
      if (isPaused || document.hidden) return;
      keep("sessionStorage", key, JSON.stringify({
        top: scrollY, isPaused, focus: document.activeElement?.id,
        details: all("details").map((one) => [one.id, one.open]),
      }));
      location.reload();
    }, 1000 * DATA.reloadSeconds);
  }

  chooseTheme();
  copyCommands();
  switchLines();
  all("figure.chart").forEach(readChart);
  sortTables();
  readMatrices();
  trimStops();
  all(".hint").forEach((hint) => { hint.hidden = false; });
  reloadWhileLive();
})();
