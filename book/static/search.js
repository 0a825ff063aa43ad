// An excerpt in the results of a search holds no folded answer.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  const text = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    page.querySelectorAll(".no-search").forEach((each) => each.remove());
    return text(page.documentElement.outerHTML, anchor);
  };
});
