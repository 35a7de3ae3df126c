// Timeline of the ranks: zoom by wheel, pinch or buttons, move by dragging. Also hands traces to Perfetto.
"use strict";
const { ranks, kinds } = JSON.parse(document.getElementById("timelines").textContent);
const canvas = document.getElementById("timeline"), context = canvas.getContext("2d");
const label = document.getElementById("event"), ROW = 16, STRIP = 40, HEAD = 20;
const longest = Math.max(...ranks.map((rank) => rank.duration));
let from = 0, to = longest, height = 0;
for (const rank of ranks) {
  rank.top = height;
  const depths = rank.lanes.map(() => 0);
  for (const [lane, depth] of rank.events) depths[lane] = Math.max(depths[lane], Math.min(depth, 11) + 1);
  rank.laneTops = depths.map((depth, lane) => HEAD + STRIP + depths.slice(0, lane).reduce((sum, d) => sum + d * ROW + 6, 0));
  height += HEAD + STRIP + depths.reduce((sum, d) => sum + d * ROW + 6, 0) + 14;
}
const toPixel = (time) => ((time - from) / (to - from)) * canvas.clientWidth;
const milliseconds = (time) => `${(time / 1000).toPrecision(4)} ms`;

function bars(values, rank, color) {
  context.fillStyle = color;
  values.forEach((share, i) => {
    const x = toPixel(i * rank.bucket);
    const width = Math.max(toPixel((i + 1) * rank.bucket) - x - 0.5, 0.5);
    context.fillRect(x, rank.top + HEAD + STRIP - 4 - share * (STRIP - 8), width, share * (STRIP - 8));
  });
}

function draw() {
  const scale = window.devicePixelRatio || 1, style = getComputedStyle(document.body);
  canvas.width = canvas.clientWidth * scale;
  canvas.height = height * scale;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  for (const rank of ranks) {
    context.fillStyle = style.color;
    context.fillText(`rank ${rank.rank}: utilization per ${milliseconds(rank.bucket)}`, 2, rank.top + HEAD / 2);
    bars(rank.utilization, rank, "#3b82f666");
    bars(rank.sm_efficiency, rank, "#059669aa");
    for (const [lane, depth, start, duration, name, kind] of rank.events) {
      const x = toPixel(start), right = toPixel(start + duration);
      if (depth > 11 || right < 0 || x > canvas.clientWidth || right - x < 0.2) continue;
      const y = rank.top + rank.laneTops[lane] + depth * ROW, left = Math.max(x, 0);
      const width = Math.max(Math.min(right, canvas.clientWidth) - left - 0.5, 0.5);
      context.fillStyle = kinds[kind];
      context.fillRect(left, y, width, ROW - 1);
      if (width > 30) {
        context.save();
        context.beginPath();
        context.rect(left, y, width, ROW);
        context.clip();
        context.fillStyle = "#fff";
        context.fillText(rank.names[name], left + 3, y + ROW / 2);
        context.restore();
      }
    }
  }
  document.getElementById("range").textContent = `${milliseconds(from)} to ${milliseconds(to)}`;
}

function zoom(factor, pixel) {
  const center = from + (pixel / canvas.clientWidth) * (to - from);
  const width = Math.min(Math.max((to - from) * factor, 1), longest);
  from = Math.min(Math.max(center - (pixel / canvas.clientWidth) * width, 0), longest - width);
  to = from + width;
  requestAnimationFrame(draw);
}

function move(pixels) {
  const width = to - from;
  from = Math.min(Math.max(from - (pixels / canvas.clientWidth) * width, 0), longest - width);
  to = from + width;
  requestAnimationFrame(draw);
}

function show(x, y) {
  const time = from + (x / canvas.clientWidth) * (to - from);
  const rank = ranks.findLast((rank) => rank.top <= y);
  const hit = rank?.events.findLast(([lane, depth, start, duration]) => {
    const top = rank.top + rank.laneTops[lane] + depth * ROW;
    return y >= top && y < top + ROW && time >= start && time <= start + duration;
  });
  label.textContent = hit
    ? `${rank.names[hit[4]]}: ${milliseconds(hit[3])} from ${milliseconds(hit[2])}, ${rank.lanes[hit[0]]}`
    : "Tap an event to see its name and time.";
}

const pointers = new Map();
canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, event.offsetX);
  show(event.offsetX, event.offsetY);
});
canvas.addEventListener("pointermove", (event) => {
  if (!pointers.has(event.pointerId)) return event.pointerType === "mouse" && show(event.offsetX, event.offsetY);
  const before = [...pointers.values()];
  pointers.set(event.pointerId, event.offsetX);
  const after = [...pointers.values()];
  if (after.length === 1) move(after[0] - before[0]);
  else zoom(Math.abs(before[0] - before[1]) / Math.max(Math.abs(after[0] - after[1]), 1), (after[0] + after[1]) / 2);
});
for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => pointers.delete(event.pointerId));
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX);
}, { passive: false });
canvas.style.height = `${height}px`;
document.getElementById("in").onclick = () => zoom(0.5, canvas.clientWidth / 2);
document.getElementById("out").onclick = () => zoom(2, canvas.clientWidth / 2);
document.getElementById("all").onclick = () => zoom(Infinity, 0);
window.addEventListener("resize", draw);
draw();

document.getElementById("json").onclick = () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([document.getElementById("tables").textContent], { type: "application/json" }));
  link.download = "profile.json";
  link.click();
};

const PERFETTO = "https://ui.perfetto.dev";
for (const button of document.querySelectorAll("button[data-trace]")) {
  button.onclick = () => {
    if (location.protocol === "file:") {
      label.textContent = "Perfetto accepts traces from a server only: run python -m http.server --bind 127.0.0.1 in this folder, and open http://127.0.0.1:8000";
      return;
    }
    const text = atob(document.getElementById(button.dataset.trace).textContent);
    const buffer = Uint8Array.from(text, (character) => character.charCodeAt(0)).buffer;
    const tab = window.open(PERFETTO);
    const timer = setInterval(() => tab?.postMessage("PING", PERFETTO), 100);
    window.addEventListener("message", function answer(event) {
      if (event.origin !== PERFETTO || event.data !== "PONG") return;
      clearInterval(timer);
      window.removeEventListener("message", answer);
      tab.postMessage({ perfetto: { buffer, title: button.textContent } }, PERFETTO);
    });
  };
}
