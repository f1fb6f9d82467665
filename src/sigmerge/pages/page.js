"use strict";

// Theme: the system's until the reader chooses.
const root = document.documentElement;
const remembered = {
  get: () => { try { return localStorage.getItem("sigmerge-theme"); } catch { return null; } },
  set: (value) => { try { localStorage.setItem("sigmerge-theme", value); } catch { /* private */ } },
};
if (["dark", "light"].includes(remembered.get())) root.dataset.theme = remembered.get();
document.getElementById("theme").addEventListener("click", () => {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
  remembered.set(root.dataset.theme);
});

// Tabs: one run at a time; without script all of them stand below each other.
const tabs = [...document.querySelectorAll("[role=tab]")];
function select(tab, focus) {
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", chosen);
    other.tabIndex = chosen ? 0 : -1;
    document.getElementById(other.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (focus) tab.focus();
}
tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) select(tabs[(index + step + tabs.length) % tabs.length], true);
  });
});
if (tabs.length) {
  const wanted = location.hash.slice(1);
  select(tabs.find((tab) => tab.getAttribute("aria-controls") === wanted) || tabs[0]);
}

// Exact values beside the pointer or the finger.
const tip = document.getElementById("tip");
function row(line, index) {
  const [label, value] = line.split("\t");
  const element = document.createElement(index ? "div" : "b");
  element.append(label);
  if (value !== undefined) {
    const number = document.createElement("span");
    number.textContent = value;
    element.append(number);
  }
  return element;
}
function show(event) {
  const mark = event.target.closest("[data-tip]");
  tip.hidden = !mark;
  if (!mark) return;
  tip.replaceChildren(...mark.dataset.tip.split("\n").map(row));
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, innerWidth - width - 8);
  const above = event.clientY - height - (event.pointerType === "touch" ? 34 : 14);
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above < 8 ? event.clientY + 18 : above}px`;
}
document.addEventListener("pointermove", show);
document.addEventListener("pointerdown", show);
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

// The recipe to copy; where the clipboard is barred, the text is selected instead.
for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1600);
  });
}

// Paper has no hover: tables are open in print.
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const details of closed) details.open = true;
});
addEventListener("afterprint", () => {
  for (const details of closed) details.open = false;
});
