// The smallest contrast of any text with what is behind it, as the browser computes both, and the size of what is drawn.
(() => {
  document.documentElement.dataset.theme = document.body.dataset.theme = "THEME";
  document.querySelectorAll("details").forEach(one => one.open = true);
  const parse = text => { const found = (text.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
    return found.length < 4 ? [...found, 1] : found; };
  const over = (front, back) => back.map((one, at) => front[3] * front[at] + (1 - front[3]) * one);
  const behind = element => element ? over(parse(getComputedStyle(element).backgroundColor),
    behind(element.parentElement)) : [255, 255, 255];
  const light = colour => [0.2126, 0.7152, 0.0722].map((weight, at) => { const share = colour[at] / 255;
    return weight * (share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4); }).reduce((a, b) => a + b);
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let smallest = 99, where = "", texts = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility({visibilityProperty: true})) continue;
    const style = getComputedStyle(element), inside = element.namespaceURI.endsWith("svg"), back = behind(element);
    const front = over(parse(inside ? style.fill : style.color), back);
    const levels = [light(front), light(back)].sort((a, b) => a - b);
    const contrast = (levels[1] + 0.05) / (levels[0] + 0.05);
    texts += 1;
    if (contrast < smallest) { smallest = contrast; where = walker.currentNode.data.trim().slice(0, 40); }
  }
  const drawings = [...document.querySelectorAll(".panels svg")].map(one => one.getBoundingClientRect());
  return JSON.stringify({contrast: smallest, where, texts, page: document.documentElement.scrollWidth,
    screen: innerWidth, drawings: drawings.length,
    empty: drawings.filter(one => one.width < 200 || one.height < 50).length,
    pictures: [...document.images].filter(one => one.checkVisibility()).map(one => one.naturalWidth),
    background: getComputedStyle(document.body).backgroundColor});
})()
