"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const make = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const short = (value) => {
    if (value === 0 || !isFinite(value)) return String(value);
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
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

  // A chart is drawn by the server; the script zooms by transforming the plotted group, and labels the axes again.
  const chart = (figure) => {
    const source = figure.querySelector("script[type='application/json']");
    if (!source) return;
    const data = JSON.parse(source.textContent);
    const svg = figure.querySelector("svg"), plot = svg.querySelector(".plot"), labels = svg.querySelector(".labels");
    const [left, top, width, height] = data.box;
    const full = { x: data.x.slice(), y: data.y.slice() };
    let shown = { x: full.x.slice(), y: full.y.slice() };
    const tip = document.createElement("div");
    tip.className = "tip";
    figure.append(tip);
    const cursor = make("line", { class: "cursor", y1: top, y2: top + height });
    const brush = make("rect", { class: "brush", y: top, height });
    svg.append(brush, cursor);
    const px = (x) => left + ((x - shown.x[0]) / (shown.x[1] - shown.x[0])) * width;
    const py = (y) => top + height - ((y - shown.y[0]) / (shown.y[1] - shown.y[0])) * height;
    const redraw = () => {
      const sx = (full.x[1] - full.x[0]) / (shown.x[1] - shown.x[0]);
      const sy = (full.y[1] - full.y[0]) / (shown.y[1] - shown.y[0]);
      const bottom = top + height;
      plot.setAttribute("transform", `matrix(${sx} 0 0 ${sy} ${px(full.x[0]) - left * sx} ${py(full.y[0]) - bottom * sy})`);
      labels.textContent = "";
      for (const at of ticks(shown.x[0], shown.x[1], data.xticks))
        labels.append(make("text", { x: px(at), y: bottom + 16, "text-anchor": "middle" }, short(at)));
      if (!data.rows)
        for (const at of ticks(shown.y[0], shown.y[1], 4)) {
          labels.append(make("line", { class: "axis", x1: left, x2: left + width, y1: py(at), y2: py(at) }));
          labels.append(make("text", { x: left - 6, y: py(at) + 4, "text-anchor": "end" }, short(at)));
        }
      figure.dataset.shown = shown.x.join(",");
      figure.classList.toggle("zoomed", shown.x[0] !== full.x[0] || shown.x[1] !== full.x[1]);
    };
    const zoom = (low, high) => {
      low = Math.max(low, full.x[0]);
      high = Math.min(high, full.x[1]);
      if (!(high - low > (full.x[1] - full.x[0]) * 1e-6)) return;
      shown.x = [low, high];
      shown.y = full.y.slice();
      if (!data.rows && (low !== full.x[0] || high !== full.x[1])) {
        let least = Infinity, most = -Infinity;
        for (const series of data.series)
          series.x.forEach((x, i) => {
            const y = series.y[i];
            if (x >= low && x <= high && y !== null) { least = Math.min(least, y); most = Math.max(most, y); }
          });
        if (most >= least) { const room = (most - least) * 0.06 || Math.abs(most) * 0.06 || 1; shown.y = [least - room, most + room]; }
      }
      redraw();
    };
    const at = (event) => {
      const box = svg.getBoundingClientRect();
      return ((event.clientX - box.left) / box.width) * data.size[0];
    };
    const value = (x) => shown.x[0] + ((Math.min(Math.max(x, left), left + width) - left) / width) * (shown.x[1] - shown.x[0]);
    const hide = () => { tip.style.visibility = cursor.style.visibility = "hidden"; };
    let start = null;
    svg.addEventListener("pointermove", (event) => {
      const x = at(event);
      if (start !== null) {
        brush.setAttribute("x", Math.max(left, Math.min(start, x)));
        brush.setAttribute("width", Math.abs(Math.min(Math.max(x, left), left + width) - Math.max(left, start)));
        brush.style.visibility = "visible";
      }
      if (data.rows || x < left || x > left + width) return hide();
      const want = value(x);
      const rows = [];
      let nearest = null;
      data.series.forEach((series) => {
        if (series.hidden) return;
        let low = 0, high = series.x.length - 1;
        if (high < 0) return;
        while (high - low > 1) { const mid = (low + high) >> 1; if (series.x[mid] < want) low = mid; else high = mid; }
        const i = Math.abs(series.x[low] - want) <= Math.abs(series.x[high] - want) ? low : high;
        if (nearest === null || Math.abs(series.x[i] - want) < Math.abs(nearest - want)) nearest = series.x[i];
        rows.push([series, i]);
      });
      if (nearest === null) return;
      tip.textContent = "";
      const head = document.createElement("div");
      head.textContent = `${data.xlabel} ${short(nearest)}`;
      tip.append(head);
      for (const [series, i] of rows.slice(0, 12)) {
        if (series.dots && Math.abs(series.x[i] - nearest) > 1e-9 * Math.abs(nearest)) continue;
        const row = document.createElement("div"), mark = document.createElement("i");
        mark.className = `swatch b${series.colour}`;
        row.append(mark, `${series.name} ${series.text ? series.text[i] : series.y[i] === null ? "-" : short(series.y[i])}`);
        tip.append(row);
      }
      cursor.setAttribute("x1", px(nearest));
      cursor.setAttribute("x2", px(nearest));
      cursor.style.visibility = tip.style.visibility = "visible";
      const box = figure.getBoundingClientRect(), side = event.clientX - box.left;
      tip.style.top = "2.2rem";
      if (side > box.width / 2) { tip.style.right = `${box.width - side + 14}px`; tip.style.left = ""; }
      else { tip.style.left = `${side + 14}px`; tip.style.right = ""; }
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
    });
    figure.__zoom = zoom;
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

  const wire = (root) => {
    root.querySelectorAll("figure.chart").forEach(chart);
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
        const kept = window.scrollY;
        version = made.body.dataset.version;
        document.querySelector("main").replaceWith(document.adoptNode(made.querySelector("main")));
        document.title = made.title;
        open.forEach((id) => document.getElementById(id)?.setAttribute("open", ""));
        wire(document.querySelector("main"));
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
