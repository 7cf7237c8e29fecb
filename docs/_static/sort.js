// a click on a head sorts a table of the leaderboard by that column; entries without a number come last
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table")) {
    const heads = [...(table.tHead?.rows[0].cells ?? [])];
    if (heads[0]?.textContent.trim() !== "rank") continue;
    heads.forEach((head, column) => {
      head.classList.add("sortable");
      head.title = "sort by this column";
      head.addEventListener("click", () => {
        const rising = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", rising ? "ascending" : "descending");
        const text = (row) => row.cells[column].textContent.trim();
        const compare = (a, b) => {
          const [x, y] = [parseFloat(text(a)), parseFloat(text(b))];
          if (isNaN(x) && isNaN(y)) return text(a).localeCompare(text(b)) * (rising ? 1 : -1);
          if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
          return (x - y) * (rising ? 1 : -1);
        };
        table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
      });
    });
  }
});
