
(() => {
  "use strict";

  // --- Sorting of tables by a click on a heading --------------------------------------------

  const units = { k: 1e3, M: 1e6, G: 1e9 };

  // The number at the beginning of a cell, scaled by its unit; NaN without one.
  const numberOf = cell => {
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    const found = /^([+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)([kMG](?![a-z]))?/.exec(cell.textContent.trim());
    return found ? Number(found[1].replaceAll(",", "")) * (units[found[2]] ?? 1) : NaN;
  };

  const sort = (table, column, order) => {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    rows.forEach((row, place) => { row.dataset.place ??= place; });
    const numbers = new Map(rows.map(row => [row, numberOf(row.cells[column])]));
    const text = row => row.cells[column].textContent;
    const hasNumbers = [...numbers.values()].some(number => !Number.isNaN(number));
    rows.sort((one, other) => {
      if (!order) return one.dataset.place - other.dataset.place;
      if (!hasNumbers) return order * text(one).localeCompare(text(other), "en", { numeric: true });
      const [a, b] = [numbers.get(one), numbers.get(other)];
      // Cells without a number come last in both directions.
      if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
      return order * (a - b);
    });
    body.append(...rows);
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.title = `${heading.title} Sort by this column`.trim();
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => {
        // Ascending, descending, original order.
        const before = heading.getAttribute("aria-sort");
        const order = before === "ascending" ? -1 : before === "descending" ? 0 : 1;
        for (const one of headings) one.removeAttribute("aria-sort");
        if (order) heading.setAttribute("aria-sort", order > 0 ? "ascending" : "descending");
        sort(table, column, order);
      });
    });
  }

  // --- Hints for tables that are wider than the window --------------------------------------

  for (const box of document.querySelectorAll(".scroll")) {
    const cue = document.createElement("button");
    cue.type = "button";
    cue.className = "cue";
    cue.hidden = true;
    box.before(cue);
    const update = () => {
      const edge = box.getBoundingClientRect().right;
      const cells = [...(box.querySelector("tr")?.cells ?? [])];
      const beyond = cells.filter(cell => cell.getBoundingClientRect().right > edge + 2).length;
      const rest = box.scrollWidth - box.clientWidth - box.scrollLeft;
      box.classList.toggle("more", rest > 2);
      cue.hidden = box.scrollWidth <= box.clientWidth + 2;
      cue.textContent = rest <= 2 ? "← back to the first column"
        : beyond ? `${beyond} more ${beyond === 1 ? "column" : "columns"} →` : "more →";
    };
    cue.addEventListener("click", () => {
      const rest = box.scrollWidth - box.clientWidth - box.scrollLeft;
      box.scrollTo({ left: rest <= 2 ? 0 : box.scrollLeft + 0.7 * box.clientWidth, behavior: "smooth" });
    });
    box.addEventListener("scroll", update, { passive: true });
    new ResizeObserver(update).observe(box);
    update();
  }

  // --- Values of the lines under the pointer ------------------------------------------------

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");
  document.body.append(tip);

  // The corners of a path in the units of its figure.
  const cornersOf = path => path.getAttribute("d").split(/[ML]/).slice(1)
    .map(text => text.trim().split(/\s+/).map(Number)).filter(pair => pair.length === 2);

  const pointsOf = svg => svg.points ??= [...svg.querySelectorAll("g[data-name]")].flatMap(line =>
    [...line.querySelectorAll(":scope > path")].flatMap(path =>
      cornersOf(path).map(([x, y]) => ({ x, y, name: line.dataset.name }))));

  // Convert a position in a plot to a value of its axis.
  const onAxis = (part, [low, high, isLogarithmic]) => isLogarithmic
    ? low * (high / low) ** part : low + part * (high - low);

  const short = number => {
    const size = Math.abs(number);
    return size >= 1e6 || (size && size < 1e-3) ? number.toExponential(2) : String(Number(number.toPrecision(4)));
  };

  const describe = (svg, point) => {
    const { width, height } = svg.viewBox.baseVal;
    const [x, y] = [point.x / width, point.y / height];
    const frame = JSON.parse(svg.dataset.frames).find(one =>
      x >= one.left - 0.01 && x <= one.right + 0.01 && y >= one.top - 0.01 && y <= one.bottom + 0.01);
    if (!frame) return "";
    const across = onAxis((x - frame.left) / (frame.right - frame.left), frame.x);
    const up = onAxis((frame.bottom - y) / (frame.bottom - frame.top), frame.y);
    const rows = JSON.parse(svg.dataset.rows ?? "[]");
    return rows.length
      ? `${rows[Math.round(up)]}, ${point.name}: ${short(across)}`
      : `${point.name}: ${short(up)} at ${short(across)} ${svg.dataset.unit}`;
  };

  const show = event => {
    const svg = event.currentTarget;
    const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    let [nearest, distance] = [null, 15];
    for (const point of pointsOf(svg)) {
      const away = Math.hypot(point.x - place.x, point.y - place.y);
      if (away < distance) [nearest, distance] = [point, away];
    }
    const text = nearest ? describe(svg, nearest) : "";
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 12, room)) + scrollX}px`;
    tip.style.top = `${event.clientY + scrollY - tip.offsetHeight - 12}px`;
  };

  for (const svg of document.querySelectorAll("svg[data-frames]")) {
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
})();
