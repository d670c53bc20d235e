const byId = id => document.getElementById(id);
const LARGEST = Number(byId("largest").dataset.bytes);
async function predict(file) {
  if (file.size > LARGEST) {
    byId("status").textContent = "No label: an image of up to " + (LARGEST >> 20) + " MB is expected";
    byId("result").hidden = true;
    return;
  }
  byId("status").textContent = "Predicting ...";
  byId("result").hidden = true;
  let found;
  try {
    const answer = await fetch("/predict", { method: "POST", body: file });
    found = await answer.json();
  } catch (error) {
    found = { error: "no answer from the server (" + error.message + ")" };
  }
  if (found.error) { byId("status").textContent = "No label: " + found.error; return; }
  const first = found.top[0];
  byId("status").textContent = found.label + ", " + (100 * first.probability).toFixed(1) + " %"
    + (found.note ? "; " + found.note : "");
  URL.revokeObjectURL(byId("given").src);
  byId("given").src = URL.createObjectURL(file);
  byId("map").closest("figure").hidden = !found.picture;
  if (found.picture) byId("map").src = found.picture;
  byId("labels").replaceChildren(...found.top.map(one => {
    const row = document.createElement("tr"), bar = document.createElement("div");
    bar.className = "bar";
    bar.style.width = 100 * one.probability + "%";
    for (const content of [one.label, (100 * one.probability).toFixed(1) + " %", bar]) {
      const cell = row.insertCell();
      cell.append(content);
    }
    row.cells[1].className = "share";
    return row;
  }));
  byId("result").hidden = false;
}
byId("file").addEventListener("change", event => { if (event.target.files[0]) predict(event.target.files[0]); });
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, event => {
    event.preventDefault();
    byId("drop").classList.toggle("over", name === "dragover");
    if (name === "drop" && event.dataTransfer.files[0]) predict(event.dataTransfer.files[0]);
  });
}
document.addEventListener("paste", event => { if (event.clipboardData.files[0]) predict(event.clipboardData.files[0]); });
