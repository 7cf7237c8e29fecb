// What the page does beyond being read: light or dark, tables that sort and filter, curves that tell
// their values. It fetches nothing; without scripts, all that the page says is there.
(() => {
  "use strict";
  const make = (tag, attributes = {}, text = "") => {
    const element = Object.assign(document.createElement(tag), attributes);
    element.textContent = text;
    return element;
  };

  // ---------------------------------------------------------------- tables
  // the text of a cell without the marks of its footnotes, and the number that it begins with
  const textOf = cell => [...cell.childNodes].filter(one => one.nodeName !== "SUP").map(one => one.textContent).join("").trim();
  const numberOf = text => parseFloat(text.replace(/^[<>] /, ""));

  // the heads of the columns: of groups of columns, those in the second row
  const headsOf = table => {
    const [first, second] = [...table.tHead.rows].map(row => [...row.cells]), heads = [];
    for (const cell of first) heads.push(...(second && cell.colSpan > 1 || cell.classList.contains("wide")
      ? second.splice(0, cell.colSpan) : [cell]));
    return heads;
  };

  const sortBy = (table, rows, column, direction) => {
    const found = rows.map(row => textOf(row.cells[column])), numbers = found.map(numberOf);
    const compare = (a, b) => {
      // what is no number comes last in either direction
      if (isNaN(numbers[a]) !== isNaN(numbers[b])) return isNaN(numbers[a]) - isNaN(numbers[b]);
      return direction * (numbers[a] - numbers[b] || found[a].localeCompare(found[b], "en", {numeric: true}));
    };
    const order = rows.map((row, at) => at);
    if (direction) order.sort((a, b) => compare(a, b) || a - b);
    order.forEach(at => table.tBodies[0].append(rows[at]));
  };

  for (const table of document.querySelectorAll(".scroll > table")) {
    const rows = [...table.tBodies[0].rows], heads = headsOf(table);
    if (rows.length < 2) continue;
    heads.forEach((head, column) => {
      const sort = make("button", {type: "button", className: "sort"}, head.textContent);
      head.replaceChildren(sort);
      sort.addEventListener("click", () => {
        // upwards, downwards, and as it was
        const next = {ascending: "descending", descending: "none"}[head.getAttribute("aria-sort")] || "ascending";
        heads.forEach(one => one.removeAttribute("aria-sort"));
        if (next !== "none") head.setAttribute("aria-sort", next);
        sortBy(table, rows, column, {ascending: 1, descending: -1, none: 0}[next]);
      });
    });
    if (rows.length < 6) continue;
    const field = make("input", {type: "search", className: "filter", placeholder: "Filter rows"});
    const count = make("span", {className: "quiet"});
    field.setAttribute("aria-label", "Show the rows that have these words");
    count.setAttribute("aria-live", "polite");
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
      const left = rows.filter(row => !row.hidden).length;
      count.textContent = words.length ? ` ${left} of ${rows.length}` : "";
    });
    const line = make("p", {className: "filters"});
    line.append(field, count);
    table.parentElement.before(line);
  }

  // ---------------------------------------------------------------- curves
  const svg = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const short = value => Number(value.toPrecision(4)).toString();

  for (const figure of document.querySelectorAll("figure")) {
    for (const drawing of figure.querySelectorAll("svg[data-axes]")) {
      const axes = JSON.parse(drawing.dataset.axes), [left, top, right, bottom] = axes.box;
      const scale = ([low, high, log], share) => log ? low * (high / low) ** share : low + share * (high - low);
      const place = ([low, high, log], value) => log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
      const all = [...new Set(axes.curves.flatMap(([, x]) => x))].sort((a, b) => a - b);
      const line = svg("line", {y1: top, y2: bottom, stroke: "var(--quiet)", "stroke-width": 0.7, visibility: "hidden"});
      const tip = make("div", {className: "tip", hidden: true});
      drawing.append(line);
      figure.append(tip);

      const hide = () => { tip.hidden = true; line.setAttribute("visibility", "hidden"); };
      const show = x => {
        const along = left + (right - left) * place(axes.x, x);
        const values = axes.curves.map(([label, places, heights]) => [label, heights[places.indexOf(x)]])
          .filter(([, value]) => typeof value === "number").sort((a, b) => b[1] - a[1]);
        if (!values.length) { hide(); return; }
        tip.replaceChildren(make("b", {}, `${axes.labels[0]} ${axes.names[x] || x}`));
        for (const [label, value] of values) tip.append(make("div", {}, `${label}: ${short(value)}`));
        for (const end of ["x1", "x2"]) line.setAttribute(end, along);
        line.setAttribute("visibility", "visible");
        tip.hidden = false;
        const frame = figure.getBoundingClientRect(), screen = drawing.getBoundingClientRect();
        const beside = screen.left - frame.left + screen.width * along / drawing.viewBox.baseVal.width;
        tip.style.left = `${Math.max(4, Math.min(beside + 12, frame.width - tip.offsetWidth - 4))}px`;
        tip.style.top = `${screen.top - frame.top + 8}px`;
      };
      const nearest = event => {
        const screen = drawing.getBoundingClientRect();
        const along = (event.clientX - screen.left) / screen.width * drawing.viewBox.baseVal.width;
        const share = (along - left) / (right - left), x = scale(axes.x, share);
        if (share < -0.05 || share > 1.05) { hide(); return; }
        show(all.reduce((best, one) => Math.abs(one - x) < Math.abs(best - x) ? one : best));
      };
      drawing.addEventListener("pointermove", nearest);
      drawing.addEventListener("pointerdown", nearest);
      drawing.addEventListener("pointerleave", hide);
    }
  }
})();
