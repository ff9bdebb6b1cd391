
/** Rounder ratios at which the colour is full; "auto" takes the first that holds what the step shows. */
const FULL_AT = [1.01, 1.1, 1.25, 2, 4];
const REWARDS = {
  any: ["any reward", () => true],
  full: ["1 or more", (item) => item.reward >= 1],
  part: ["between 0 and 1", (item) => item.reward > 0 && item.reward < 1],
  none: ["0 or less", (item) => item.reward !== null && item.reward <= 0],
  masked: ["any, with masked tokens", (item) => item.state.includes("m")],
};

class Explorer {
  constructor(root) {
    this.root = root;
    this.items = new Map();
    this.run = this.choice("Run", DATA.rollouts.map((entry, i) => [String(i), DATA.runs[entry.run]]));
    this.step = this.choice("Step", []);
    this.environment = this.choice("Environment", []);
    this.reward = this.choice("Reward", Object.entries(REWARDS).map(([key, [label]]) => [key, label]));
    this.full = this.choice("Full colour at ratio", [["auto", "automatic"], ...[1.0001, 1.001, ...FULL_AT].map((r) => [String(r), `${r} and 1/${r}`])]);
    this.previous = element("button", { type: "button", "aria-label": "Previous step" }, "‹");
    this.next = element("button", { type: "button", "aria-label": "Next step" }, "›");
    this.key = element("div", { class: "key" });
    this.count = element("p", { class: "count", role: "status" });
    this.list = element("div");
    this.card = element("div", { id: "card", hidden: "" });
    this.spoken = element("div", { class: "hidden", "aria-live": "polite" });
    document.body.append(this.card, this.spoken);
    const controls = element("div", { class: "controls" });
    if (DATA.rollouts.length > 1) controls.append(this.run.label);
    controls.append(element("span", { class: "pair" }, this.step.label, this.previous, this.next), this.environment.label, this.reward.label, this.full.label);
    root.append(controls, this.key, this.count, this.list);
    this.run.select.addEventListener("change", () => { this.fillRun(); this.render(); });
    for (const { select } of [this.step, this.environment, this.reward, this.full]) select.addEventListener("change", () => this.render());
    this.previous.addEventListener("click", () => this.move(-1));
    this.next.addEventListener("click", () => this.move(1));
    this.list.addEventListener("pointerover", (event) => this.show(event.target.closest(".sampled")));
    this.list.addEventListener("pointerleave", () => this.hide());
    this.fillRun();
    this.render();
  }

  choice(name, options) {
    const select = element("select");
    const fill = (entries) => select.replaceChildren(...entries.map(([value, text]) => element("option", { value }, text)));
    fill(options);
    return { select, fill, label: element("label", {}, name, select) };
  }

  fillRun() {
    this.entry = DATA.rollouts[Number(this.run.select.value)];
    this.step.fill(this.entry.steps.map((step, i) => [String(i), String(step.step)]));
    this.step.select.value = String(this.entry.steps.length - 1);
    const names = [...new Set(this.entry.steps.flatMap((step) => step.groups.map((group) => group.environment)))].sort();
    this.environment.fill([["", "all"], ...names.map((name) => [name, name])]);
  }

  move(by) {
    this.step.select.value = String(Number(this.step.select.value) + by);
    this.render();
  }

  render() {
    const index = Number(this.step.select.value), step = this.entry.steps[index];
    this.previous.disabled = index === 0;
    this.next.disabled = index === this.entry.steps.length - 1;
    const environment = this.environment.select.value, [, wanted] = REWARDS[this.reward.select.value];
    const groups = step.groups
      .filter((group) => !environment || group.environment === environment)
      .map((group) => ({ ...group, shown: group.items.filter(wanted) }))
      .filter((group) => group.shown.length);
    const total = step.groups.reduce((sum, group) => sum + group.items.length, 0);
    const shown = groups.reduce((sum, group) => sum + group.shown.length, 0);
    const logRatios = step.groups.flatMap((group) => group.items.flatMap((item) => item.log_ratio.filter((v) => v !== null)));
    const [least, greatest] = logRatios.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [0, 0]);
    const largest = Math.max(-least, greatest);
    const chosen = this.full.select.value;
    this.fullAt = chosen === "auto" ? FULL_AT.find((r) => Math.log(r) >= largest) || FULL_AT[FULL_AT.length - 1] : Number(chosen);
    this.drawKey();
    const agree = largest < Math.log(1.01) ? " Every ratio is within 1%: engine and trainer agree." : ` Ratios of the step lie between ${format(Math.exp(least))} and ${format(Math.exp(greatest))}.`;
    this.count.textContent = `Step ${step.step}: ${shown} of ${total} rollouts on this page.${total ? agree : ""}`;
    this.items.clear();
    this.hide();
    this.list.replaceChildren(...groups.map((group) => this.group(group)));
  }

  drawKey() {
    const ramp = element("span", { class: "ramp", "aria-hidden": "true" });
    for (let i = -4; i <= 4; i++) {
      const cell = element("i");
      this.colour(cell, (i / 4) * Math.log(this.fullAt));
      ramp.append(cell);
    }
    const low = `r ≤ ${format(1 / this.fullAt)}`, high = `r ≥ ${format(this.fullAt)}`;
    this.key.replaceChildren(
      element("span", { class: "scale" }, low, ramp, high),
      element("span", {}, element("span", { class: "sample" }, element("span", { class: "token masked" }, "masked")), " k = 0, no policy gradient"),
      element("span", {}, element("span", { class: "sample" }, element("span", { class: "token unknown" }, "unknown")), " no engine log-prob, not trained"),
      element("span", {}, element("span", { class: "token context" }, "grey"), " prompt and tool text"),
    );
  }

  colour(node, logRatio) {
    const strength = Math.min(1, Math.abs(logRatio) / Math.log(this.fullAt)) * 0.66;
    node.classList.add("token", "sampled", logRatio < 0 ? "tone-below" : "tone-above");
    node.style.setProperty("--strength", strength.toFixed(3));
  }

  group(group) {
    const rewards = group.items.map((item) => item.reward).filter((r) => r !== null);
    const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    const prompt = element("div", { class: "tokens prompt", tabindex: "0", role: "group", "aria-label": "Prompt" });
    if (group.prompt_cut) prompt.append(`… ${group.prompt_cut} earlier tokens are not on this page …\n`);
    prompt.append(...group.prompt.map((text) => this.text(text)));
    return element("div", { class: "group" },
      element("h3", {}, group.id || "group", element("small", {}, `${group.environment} · ${group.items.length} rollouts on this page · mean reward ${format(mean)}`)),
      group.prompt.length ? prompt : "",
      ...group.shown.map((item) => this.rollout(item)));
  }

  rollout(item) {
    const sampled = item.log_ratio.length, masked = [...item.state].filter((s) => s === "m").length;
    const versions = [...new Set(item.version)].sort((a, b) => a - b);
    const largest = Math.max(0, ...item.log_ratio.filter((v) => v !== null).map(Math.abs));
    const facts = [["reward", format(item.reward)], ["A", (item.advantage > 0 ? "+" : "") + format(item.advantage)], ["sampled tokens", String(sampled)], ["masked", String(masked)], ["largest |log r|", format(largest)], ["weight version", versions.join(", ")]];
    const header = element("header", {}, ...facts.map(([name, value]) => element("span", {}, `${name} `, element("b", {}, value))), element("span", {}, item.id));
    const body = element("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": `Rollout with reward ${format(item.reward)}; arrow keys walk through its sampled tokens` });
    let position = 0;
    item.tokens.forEach((text, i) => {
      const token = this.text(text);
      token.classList.add("token");
      const state = item.state[i];
      if (state === "c") token.classList.add("context");
      else {
        this.colour(token, item.log_ratio[position] ?? 0);
        if (state === "m") token.classList.add("masked");
        if (state === "x") token.classList.add("unknown");
        this.items.set(token, { item, text, state, position });
        position += 1;
      }
      body.append(token);
    });
    if (item.cut) body.append(element("span", { class: "token context" }, ` … ${item.cut} more tokens are not on this page`));
    body.addEventListener("keydown", (event) => this.walk(event, body));
    body.addEventListener("blur", () => this.hide());
    return element("article", { class: "rollout" }, header, body);
  }

  /** A token's text with its invisible characters made visible. */
  text(text) {
    const node = element("span");
    if (text === "") node.append(element("i", { class: "sign" }, "∅"));
    for (const part of text.split(/([\n\r\t])/)) {
      if (part === "\n") node.append(element("i", { class: "sign" }, "⏎"), "\n");
      else if (part === "\r") node.append(element("i", { class: "sign" }, "␍"));
      else if (part === "\t") node.append(element("i", { class: "sign" }, "⇥"), "\t");
      else if (part) node.append(part);
    }
    return node;
  }

  walk(event, body) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.hide();
    if (move === undefined) return;
    event.preventDefault();
    const tokens = [...body.querySelectorAll(".sampled")];
    const here = tokens.indexOf(this.current);
    if (tokens.length) this.show(tokens[Math.min(tokens.length - 1, Math.max(0, here + move))], true);
  }

  show(token, speak = false) {
    if (!token || !this.items.has(token)) return this.hide();
    this.hide();
    this.current = token;
    token.classList.add("current");
    const rows = this.facts(this.items.get(token));
    const shown = JSON.stringify(this.items.get(token).text);
    this.card.replaceChildren(element("div", { class: "what" }, shown), element("table", {}, element("tbody", {}, ...rows.map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value))))));
    this.card.hidden = false;
    const at = token.getClientRects()[0], card = this.card.getBoundingClientRect();
    const left = Math.min(Math.max(8, at.left), document.documentElement.clientWidth - card.width - 8);
    const above = at.top - card.height - 8;
    this.card.style.left = `${left + window.scrollX}px`;
    this.card.style.top = `${(above > 0 ? above : at.bottom + 8) + window.scrollY}px`;
    if (speak) this.spoken.textContent = `${shown}: ` + rows.map(([name, value]) => `${name} ${value}`).join(", ");
  }

  facts({ item, state, position }) {
    const engine = item.engine[position], logRatio = item.log_ratio[position];
    const probability = (logp) => (logp === null ? "–" : `${format(logp)}  (p ${format(Math.exp(logp))})`);
    return [
      ["engine log-prob", probability(engine)],
      ["policy log-prob", probability(logRatio === null ? null : engine + logRatio)],
      ["log r", format(logRatio)],
      ["ratio r", logRatio === null ? "–" : Math.abs(logRatio) < 1e-3 ? `1 ${logRatio < 0 ? "−" : "+"} ${format(Math.abs(Math.expm1(logRatio)))}` : format(Math.exp(logRatio))],
      ["advantage A", format(item.advantage)],
      ["mask k", { k: "1", m: "0, masked", x: "left out" }[state]],
      ["gradient scale c", format(item.scale[position])],
      ["weight version", String(item.version[position])],
    ];
  }

  hide() {
    if (this.current) this.current.classList.remove("current");
    this.current = null;
    this.card.hidden = true;
  }
}

const explorer = document.getElementById("explorer");
if (DATA.rollouts.length) new Explorer(explorer);
else explorer.append(element("p", { class: "note" }, "No rollouts were logged in these runs."));
