"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const MOST_ROWS = 8;  // under the pointer
  const make = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const short = (value) => {
    if (value === 0 || !isFinite(value)) return String(value);
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace(/\.?0+e/, "e");
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(4)));
  };
  const ticks = (low, high, most) => {
    const raw = (high - low) / most || 1;
    const power = Math.pow(10, Math.floor(Math.log10(raw)));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw * 0.999);
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
    return found;
  };

  const decades = (low, high) => {
    const of = (factors) => {
      const found = [];
      for (let power = Math.floor(low); power <= high; power += 1)
        for (const factor of factors) {
          const place = power + Math.log10(factor);
          if (place >= low && place <= high) found.push(place);
        }
      return found;
    };
    const fine = of([1, 2, 5]), coarse = of([1]);
    if (fine.length <= 8 || coarse.length < 2) return fine;
    const every = Math.ceil(coarse.length / 8);
    return coarse.filter((_, place) => place % every === 0);
  };

  // The page has the picture; the script zooms by transforming the plotted group, and labels the axes again.
  const chart = (figure) => {
    const source = figure.querySelector("script[type='application/json']");
    if (!source) return;
    const data = JSON.parse(source.textContent);
    const svg = figure.querySelector("svg"), plot = svg.querySelector(".plot"), labels = svg.querySelector(".labels");
    const [left, top, width, height] = data.box;
    const full = { x: data.x.slice(), y: data.y.slice() };
    let shown = { x: full.x.slice(), y: full.y.slice() };
    let is_log = false;
    const scaled = (y) => (is_log ? Math.log10(y) : y);
    const tip = document.createElement("div");
    tip.className = "tip";
    figure.append(tip);
    const cursor = make("line", { class: "cursor", y1: top, y2: top + height });
    const brush = make("rect", { class: "brush", y: top, height });
    svg.append(brush, cursor);
    const px = (x) => left + ((x - shown.x[0]) / (shown.x[1] - shown.x[0])) * width;
    const py = (y) => top + height - ((scaled(y) - shown.y[0]) / (shown.y[1] - shown.y[0])) * height;
    const label_x = () => {
      const bottom = top + height + 16;
      let free = -Infinity;
      const all = data.named || ticks(shown.x[0], shown.x[1], data.xticks).filter((at) => !data.whole || Math.abs(at - Math.round(at)) < 1e-9).map((at) => [at, short(at)]);
      for (const [at, text] of all) {
        if (at < shown.x[0] || at > shown.x[1] || px(at) - text.length * 3.5 < free) continue;
        free = px(at) + text.length * 3.5 + 8;
        const side = (px(at) - left) / width; // long names at the ends would leave the picture
        const anchor = text.length < 7 || (side > 0.15 && side < 0.85) ? "middle" : side < 0.5 ? "start" : "end";
        labels.append(make("text", { x: px(at), y: bottom, "text-anchor": anchor }, text));
      }
    };
    const label_y = () => {
      const places = is_log ? decades(...shown.y) : ticks(shown.y[0], shown.y[1], data.yticks);
      for (const place of places) {
        const at = top + height - ((place - shown.y[0]) / (shown.y[1] - shown.y[0])) * height;
        labels.append(make("line", { class: "axis", x1: left, x2: left + width, y1: at, y2: at }));
        labels.append(make("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, short(is_log ? Math.pow(10, place) : place)));
      }
    };
    const redraw = () => {
      const sx = (full.x[1] - full.x[0]) / (shown.x[1] - shown.x[0]);
      const sy = (full.y[1] - full.y[0]) / (shown.y[1] - shown.y[0]);
      const bottom = top + height, from = top + height - ((full.y[0] - shown.y[0]) / (shown.y[1] - shown.y[0])) * height;
      plot.setAttribute("transform", `matrix(${sx} 0 0 ${sy} ${px(full.x[0]) - left * sx} ${from - bottom * sy})`);
      labels.textContent = "";
      label_x();
      if (!data.rows) label_y();
      figure.dataset.shown = shown.x.join(",");
      figure.querySelectorAll("[data-zoom]").forEach((one) => one.setAttribute("aria-pressed", String(one.dataset.zoom.split(",").every((at, i) => Math.abs(at - shown.x[i]) < 1e-6 * full.x[1]))));
      figure.classList.toggle("zoomed", shown.x[0] !== full.x[0] || shown.x[1] !== full.x[1]);
    };
    const between = (low, high) => {
      let least = Infinity, most = -Infinity;
      for (const series of data.series)
        series.x.forEach((x, i) => {
          const y = series.y[i] === null ? null : scaled(series.y[i]);
          if (x >= low && x <= high && y !== null) { least = Math.min(least, y); most = Math.max(most, y); }
        });
      const margin = (most - least) * 0.06 || Math.abs(most) * 0.06 || 1;
      return most >= least ? [least - margin, most + margin] : null;
    };
    const zoom = (low, high) => {
      low = Math.max(low, full.x[0]);
      high = Math.min(high, full.x[1]);
      if (!(high - low > (full.x[1] - full.x[0]) * 1e-6)) return;
      shown.x = [low, high];
      shown.y = full.y.slice();
      if (!data.rows && (low !== full.x[0] || high !== full.x[1])) shown.y = between(low, high) || shown.y;
      redraw();
    };
    const log = figure.querySelector("button.log");
    const turn = () => {  // the lines are drawn again from the values: a transform does not make a logarithm
      is_log = !is_log;
      log.setAttribute("aria-pressed", String(is_log));
      figure.classList.toggle("logged", is_log);
      full.y = is_log ? between(-Infinity, Infinity) : data.y.slice();
      const kept = shown.x;
      shown = { x: full.x.slice(), y: full.y.slice() };
      const paths = Array.from(plot.querySelectorAll("path"));
      for (const series of data.series) {
        let line = "", dots = "", open = false;
        series.x.forEach((x, i) => {
          const y = series.y[i];
          if (y === null) { open = false; return; }
          const place = `${px(x).toFixed(1)} ${py(y).toFixed(1)}`;
          line += (open ? "L" : "M") + place;
          dots += `M${place}h0`;
          open = true;
        });
        if (!series.texts) paths.shift().setAttribute("d", line);
        if (series.dots || series.texts) paths.shift().setAttribute("d", dots);
      }
      zoom(...kept);
    };
    if (log) log.addEventListener("click", turn);
    const at = (event) => {
      const box = svg.getBoundingClientRect();
      return ((event.clientX - box.left) / box.width) * data.size[0];
    };
    const value = (x) => shown.x[0] + ((Math.min(Math.max(x, left), left + width) - left) / width) * (shown.x[1] - shown.x[0]);
    const hide = () => { tip.style.visibility = cursor.style.visibility = "hidden"; };
    let start = null;
    const nearest_of = (series, want, height_at) => {
      let best = -1, least = Infinity;
      series.x.forEach((x, i) => {
        if (series.y[i] === null) return;
        const far = Math.abs(px(x) - px(want)) + (series.texts ? Math.abs(py(series.y[i]) - height_at) : 0);
        if (far < least) { least = far; best = i; }
      });
      return best;
    };
    const tell = (want, height_at, side) => {
      const found = data.series.filter((one) => !one.hidden && !is_off(one.name))
        .map((one) => [one, nearest_of(one, want, height_at)]).filter(([, i]) => i >= 0);
      if (!found.length) return hide();
      const far = ([one, i]) => Math.abs(one.x[i] - want);
      const chosen = found.find(([one]) => one.texts) || found.reduce((one, other) => (far(other) < far(one) ? other : one));
      const nearest = chosen[0].x[chosen[1]];
      let rows = found.filter(([one, i]) => one === chosen[0] || !(one.dots || one.texts || data.named) || Math.abs(one.x[i] - nearest) <= 1e-9 * Math.abs(nearest));
      const below = ([one, i]) => Math.abs(py(one.y[i]) - height_at);
      const closest = rows.reduce((one, other) => (below(other) < below(one) ? other : one));
      const left_out = rows.length - MOST_ROWS;
      if (left_out > 0) rows = rows.sort((one, other) => below(one) - below(other)).slice(0, MOST_ROWS);
      tip.textContent = "";
      const line = (text, colour, is_bold) => {
        const row = document.createElement("div");
        if (colour !== null) { const mark = document.createElement("i"); mark.className = `swatch b${colour}`; row.append(mark); }
        row.append(text);
        if (is_bold) row.style.fontWeight = "600";
        tip.append(row);
      };
      const named = data.named && data.named.find(([at]) => Math.abs(at - nearest) <= 1e-5 * Math.abs(nearest));
      line(`${data.xlabel} ${named ? named[1] : short(nearest)}`, null, false);
      for (const row of rows) {
        const [one, i] = row;
        const name = one.texts ? one.texts[i] : one.name;  // after the value: a long name is cut off
        line(`${short(one.y[i])} ${name}`, one.colour, row === closest && found.length > 3);
      }
      if (left_out > 0) line(`and ${left_out} more`, null, false);
      cursor.setAttribute("x1", px(nearest));
      cursor.setAttribute("x2", px(nearest));
      cursor.style.visibility = tip.style.visibility = "visible";
      tip.style.top = `${figure.querySelector("figcaption").offsetHeight + 12}px`;
      const space = document.documentElement.clientWidth, before = figure.getBoundingClientRect().left;
      const beside = before + side + 14 + tip.offsetWidth < space ? side + 14 : side - 14 - tip.offsetWidth;
      tip.style.left = `${Math.max(4 - before, Math.min(beside, space - before - tip.offsetWidth - 4))}px`;
    };
    const is_off = (name) => Array.from(plot.querySelectorAll("path.off")).some((path) => path.dataset.name === name);
    svg.addEventListener("pointermove", (event) => {
      const x = at(event);
      if (start !== null) {
        brush.setAttribute("x", Math.max(left, Math.min(start, x)));
        brush.setAttribute("width", Math.abs(Math.min(Math.max(x, left), left + width) - Math.max(left, start)));
        brush.style.visibility = "visible";
      }
      if (data.rows || x < left || x > left + width) return hide();
      const box = figure.getBoundingClientRect(), picture = svg.getBoundingClientRect();
      const height_at = ((event.clientY - picture.top) / picture.height) * data.size[1];
      tell(value(x), height_at, event.clientX - box.left);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch") return;
      start = at(event);
      svg.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    svg.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const end = at(event);
      brush.style.visibility = "hidden";
      if (Math.abs(end - start) > 6) zoom(value(Math.min(start, end)), value(Math.max(start, end)));
      start = null;
    });
    svg.addEventListener("dblclick", () => zoom(full.x[0], full.x[1]));
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      const middle = value(at(event)), factor = (event.deltaY || event.deltaX) < 0 ? 0.8 : 1.25;
      zoom(middle - (middle - shown.x[0]) * factor, middle + (shown.x[1] - middle) * factor);
    }, { passive: false });
    figure.querySelector(".reset").addEventListener("click", () => zoom(full.x[0], full.x[1]));
    figure.querySelectorAll("[data-zoom]").forEach((button) => {
      const [low, high] = button.dataset.zoom.split(",").map(Number);
      button.addEventListener("click", () => zoom(low, high));
      if (button.hasAttribute("data-first")) zoom(low, high);
    });
    figure.__zoom = zoom;
    figure.__log = log ? turn : null;
  };

  const copies = (root) => root.querySelectorAll("button.copy").forEach((button) =>
    button.addEventListener("click", () => {
      const text = button.parentElement.querySelector("code").textContent;
      const done = () => { button.textContent = "copied"; setTimeout(() => { button.textContent = "copy"; }, 1500); };
      const by_hand = () => {
        const area = document.createElement("textarea");
        area.value = text;
        document.body.append(area);
        area.select();
        document.execCommand("copy");
        area.remove();
        done();
      };
      if (navigator.clipboard && window.isSecureContext) navigator.clipboard.writeText(text).then(done, by_hand);
      else by_hand();
    }));

  const tables = (root) => root.querySelectorAll("table.sortable").forEach((table) =>
    table.querySelectorAll("th").forEach((head, column) => {
      head.dataset.sort = "";
      head.title = "sort";
      head.addEventListener("click", () => {
        const body = table.tBodies[0], up = head.dataset.sort !== "up";
        const of = (row) => { const cell = row.cells[column]; return cell.dataset.value ?? cell.textContent; };
        const rows = Array.from(body.rows).sort((one, other) => {
          const a = of(one), b = of(other), x = parseFloat(a), y = parseFloat(b);
          return (isNaN(x) || isNaN(y) ? (isNaN(x) - isNaN(y)) || a.localeCompare(b) : x - y) * (up ? 1 : -1);
        });
        table.querySelectorAll("th").forEach((other) => { other.dataset.sort = ""; });
        head.dataset.sort = up ? "up" : "down";
        body.append(...rows);
      });
    }));

  const filters = (root) => root.querySelectorAll("input.filter").forEach((input) =>
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase();
      for (const row of input.parentElement.querySelector("tbody").rows) row.hidden = !row.textContent.toLowerCase().includes(words);
    }));

  // A name in a legend highlights its lines under the pointer, and hides or shows them with a click.
  const legends = (root) => root.querySelectorAll("[data-key]").forEach((key) => {
    const lines = () => (key.closest("figure") || key.closest("section")).querySelectorAll("path[data-name]");
    const mine = () => Array.from(lines()).filter((path) => path.dataset.name === key.dataset.key);
    key.addEventListener("pointerenter", () => { if (mine().length) lines().forEach((path) => path.classList.toggle("dim", path.dataset.name !== key.dataset.key)); });
    key.addEventListener("pointerleave", () => lines().forEach((path) => path.classList.remove("dim")));
    key.addEventListener("click", () => { const off = key.classList.toggle("off"); mine().forEach((path) => path.classList.toggle("off", off)); });
  });

  const wire = (root) => {
    root.querySelectorAll("figure.chart").forEach(chart);
    legends(root);
    copies(root);
    tables(root);
    filters(root);
  };
  wire(document);

  // `ipurun watch` serves the page and its parts again during a run; a page from a file stays as it is.
  const live = document.body.dataset.live;
  if (!live) return;
  let version = document.body.dataset.version;
  const look = async () => {
    let wait = 2000;
    try {
      const answer = await fetch(`${live}?version=${encodeURIComponent(version)}`, { cache: "no-store" });
      if (answer.status === 200) {
        const made = new DOMParser().parseFromString(await answer.text(), "text/html");
        const open = Array.from(document.querySelectorAll("details[open][id]"), (one) => one.id);
        const zoomed = Array.from(document.querySelectorAll("figure.zoomed[id]"), (one) => [one.id, one.dataset.shown]);
        const logged = Array.from(document.querySelectorAll("figure.logged[id]"), (one) => one.id);
        const hidden = new Set(Array.from(document.querySelectorAll("[data-key].off"), (one) => one.dataset.key));
        const typed = Array.from(document.querySelectorAll("input.filter"), (one) => one.value);
        const kept = window.scrollY;
        version = made.body.dataset.version;
        document.querySelector("main").replaceWith(document.adoptNode(made.querySelector("main")));
        document.title = made.title;
        open.forEach((id) => document.getElementById(id)?.setAttribute("open", ""));
        wire(document.querySelector("main"));
        logged.forEach((id) => document.getElementById(id)?.__log?.());
        document.querySelectorAll("[data-key]").forEach((one) => { if (hidden.has(one.dataset.key)) one.click(); });
        document.querySelectorAll("input.filter").forEach((one, place) => { if (typed[place]) { one.value = typed[place]; one.dispatchEvent(new Event("input")); } });
        zoomed.forEach(([id, x]) => document.getElementById(id)?.__zoom?.(...x.split(",").map(Number)));
        window.scrollTo(0, kept);
      } else if (answer.status !== 204) throw new Error(answer.status);
      document.querySelector(".stale").style.display = "none";
    } catch (error) {
      document.querySelector(".stale").style.display = "block";
      wait = 5000;
    }
    setTimeout(look, document.hidden ? 10000 : wait);
  };
  setTimeout(look, 2000);
})();
