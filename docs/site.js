// Tables and pictures that scroll on a phone scroll by keyboard too. The theme wraps tables after it has loaded the page.
const SCROLLING = '.md-typeset__scrollwrap:not([tabindex]), p:not([tabindex]):has(> img[src$="packages.svg"])';
new MutationObserver(() => {
  for (const element of document.querySelectorAll(SCROLLING)) element.tabIndex = 0;
}).observe(document.body, { childList: true, subtree: true });
