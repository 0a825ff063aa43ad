// fewer-bits.html?short: without the slides that the short form leaves out
if (new URLSearchParams(location.search).has("short"))
  document.querySelectorAll("img.long").forEach((image) => image.closest(".slides > section").remove());
