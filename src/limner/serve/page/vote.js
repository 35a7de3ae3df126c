"use strict";
const $ = (id) => document.getElementById(id);
const KEYS = { 1: "left", 2: "right", 0: "equal" };
let asked = null;  // the present question, with the time at which its pictures were shown

async function send(path, body) {
  const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const response = await fetch(path, options);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error.message);
  return answer;
}

async function show(answer) {
  asked = null;
  $("vote").hidden = !answer.question;
  if (!answer.question) {
    $("status").textContent = `Thank you. You have compared ${answer.done} pairs, and no others are left.`;
    return;
  }
  const right = answer.left === "first" ? "second" : "first";
  const images = { left: $("left").querySelector("img"), right: $("right").querySelector("img") };
  images.left.src = `pictures/${answer.pair}/${answer.left}`;
  images.right.src = `pictures/${answer.pair}/${right}`;
  $("question").textContent = answer.text;
  $("caption").textContent = `“${answer.caption}”`;
  $("caption").hidden = answer.question === "realism";
  $("progress").max = answer.total;
  $("progress").value = answer.done;
  $("status").textContent = `${answer.done} of ${answer.total} pairs done`;
  await Promise.all(Object.values(images).map((image) => image.decode()));
  asked = { ...answer, sides: { left: answer.left, right, equal: "equal" }, shown: performance.now() };
}

async function act(path, body) {
  $("error").hidden = true;
  try {
    await show(await send(path, { voter: $("voter").value.trim(), ...body }));
  } catch (error) {
    $("error").textContent = error.message;
    $("error").hidden = false;
  }
}

function choose(side) {
  if (!asked) return;
  const { pair, question, sides, shown } = asked;
  asked = null;  // a second click does not vote on the next pair
  act("vote", { pair, question, choice: sides[side], seconds: (performance.now() - shown) / 1000 });
}

for (const side of Object.values(KEYS)) $(side).addEventListener("click", () => choose(side));
document.addEventListener("keydown", (event) => {
  if (event.key in KEYS && !event.repeat && event.target !== $("voter")) choose(KEYS[event.key]);
});
$("start").addEventListener("submit", (event) => {
  event.preventDefault();
  $("start").hidden = true;
  act("next", {});
});
