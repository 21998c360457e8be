"use strict";
// Puts the page together: tabs, theme, keys.

const THEMES = ["auto", "light", "dark"];

function showTab(name, focus = false) {
  for (const other of ["chat", "race"]) {
    const selected = other === name;
    $(other).hidden = !selected;
    const tab = $(`tab-${other}`);
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
    if (selected && focus) tab.focus();
  }
  $("new-chat").classList.toggle("away", name !== "chat");
}

function showTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").value = theme;
}

/** Remembered where the browser lets us; private windows may not. */
function storedTheme(theme) {
  try {
    if (theme) localStorage.setItem("sol-theme", theme);
    return localStorage.getItem("sol-theme");
  } catch {
    return null;
  }
}

for (const name of ["chat", "race"]) {
  $(`tab-${name}`).addEventListener("click", () => showTab(name));
  $(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") showTab(name === "chat" ? "race" : "chat", true);
  });
}
$("theme").addEventListener("change", () => {
  storedTheme($("theme").value);
  showTheme($("theme").value);
});
const remembered = storedTheme();
showTheme(THEMES.includes(remembered) ? remembered : "auto");

$("toggle-settings").addEventListener("click", () => openSettings(!$("settings").classList.contains("open")));
$("settings-form").addEventListener("submit", (event) => event.preventDefault());
$("temperature").addEventListener("input", () => ($("temperature-value").value = $("temperature").value));
$("model").addEventListener("change", showModel);
$("api-key").addEventListener("change", connect);
for (const id of ["stop", "race-stop"]) $(id).addEventListener("click", () => activity.stop());
addEventListener("keydown", (event) => {
  if (event.key === "Escape") activity.stop();
});

startChat();
startRace();
$("message").focus();
connect();
