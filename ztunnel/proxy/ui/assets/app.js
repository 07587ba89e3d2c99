// The live page: follows /ui/events while it is visible and shows each event; the form asks /explain.
// Everything that the mesh says is set by textContent and never parsed as HTML.
"use strict";

(() => {
  const $ = (id) => document.getElementById(id);
  const VIEWS = ["mesh", "connections", "policies", "certificates", "configuration", "explain"];
  let last = null, chosen = null, paused = false, stream = null, receivedAt = 0;

  // Words and numbers

  function number(value) {
    return value === null || value === undefined ? "–" : value.toLocaleString("en");
  }
  function bytes(value) {
    if (value === null || value === undefined) return "–";
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let unit = 0;
    while (value >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
    return `${unit && value < 99.5 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
  }
  function perSecond(value) {
    if (value === null || value === undefined) return "–";
    return `${value >= 10 || value === 0 ? Math.round(value) : value.toFixed(1)}/s`;
  }
  function span(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
    const first = parts.findIndex(([size]) => seconds >= size);
    if (first < 0) return "0 s";
    const [size, unit] = parts[first];
    const whole = Math.floor(seconds / size);
    if (first === 3) return `${whole} s`;
    const [nextSize, nextUnit] = parts[first + 1];
    const rest = Math.floor((seconds - whole * size) / nextSize);
    return rest && first < 2 ? `${whole} ${unit} ${rest} ${nextUnit}` : `${whole} ${unit}`;
  }
  function moment(seconds) {
    return seconds === null || seconds === undefined ? "–"
      : new Date(seconds * 1000).toISOString().replace("T", " ").replace(/\.\d+Z/, " UTC");
  }
  function ago(seconds, now) {
    return seconds === null || seconds === undefined ? "never" : `${span(Math.max(0, now - seconds))} ago`;
  }
  function short(identity) {
    return identity.replace(/^spiffe:\/\/[^/]+\/ns\/([^/]+)\/sa\/([^/]+)$/, "$1/$2");
  }

  // Elements

  function setText(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }
  function child(parent, tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  // Fill a table's body. A cell is a text, or {text, sub, className, tag, title, button}. Rows and cells are kept,
  // so that selections and focus survive an event.
  function fill(tableId, rows, nothing) {
    const body = $(tableId).tBodies[0];
    const columns = $(tableId).tHead.rows[0].cells.length;
    if (!rows.length) {
      if (!body.querySelector("td.empty") || body.rows.length !== 1) {
        body.replaceChildren();
        const cell = child(child(body, "tr"), "td", "empty");
        cell.colSpan = columns;
      }
      setText(body.rows[0].cells[0], nothing);
      return;
    }
    if (body.querySelector("td.empty")) body.replaceChildren();
    while (body.rows.length > rows.length) body.deleteRow(-1);
    rows.forEach((cells, index) => {
      const row = body.rows[index] || child(body, "tr");
      cells.forEach((given, place) => {
        const cell = row.cells[place] || child(row, "td");
        const value = typeof given === "object" ? given : { text: given };
        const print = JSON.stringify([value.text, value.sub, value.className, value.tag, value.title, value.label]);
        if (cell.dataset.print === print) { cell.act = value.act; return; }
        cell.dataset.print = print;
        cell.act = value.act;
        const held = cell.querySelector("button");
        if (held && value.act) {
          held.setAttribute("aria-label", value.label);
          return;
        }
        cell.replaceChildren();
        cell.className = value.className || "";
        cell.title = value.title || "";
        if (value.act) {
          const button = child(cell, "button", "small", value.text);
          button.type = "button";
          button.setAttribute("aria-label", value.label);
          button.addEventListener("click", () => cell.act());
        } else if (value.tag) {
          child(cell, "span", `tag ${value.tag}`, value.text);
        } else {
          cell.append(value.text);
        }
        if (value.sub) child(cell, "small", "", value.sub);
      });
    });
  }
  const num = (text, bad) => ({ text, className: bad ? "num bad" : "num" });
  const security = (value) => (value === "none" ? { text: "–", title: "ended before anything was sent" }
    : { text: value, tag: value === "mTLS" ? "mtls" : "plain" });

  function tiles(id, entries) {
    const list = $(id);
    while (list.children.length > entries.length) list.lastChild.remove();
    entries.forEach(([name, value, bad], index) => {
      let tile = list.children[index];
      if (!tile) {
        tile = child(list, "div");
        child(tile, "dt");
        child(tile, "dd");
      }
      setText(tile.children[0], name);
      setText(tile.children[1], value);
      tile.children[1].className = bad ? "bad" : "";
    });
  }
  function rest(id, list, what) {
    setText($(`rest-${id}`), list.left_out ? `${number(list.left_out)} more ${what} are not shown.` : "");
  }

  // The mesh

  // Both ends of a connection may be on this node, and then both report it: of a pair the larger count holds.
  function merged(flows) {
    const pairs = new Map();
    for (const flow of flows) {
      const key = JSON.stringify([flow.source, flow.destination, flow.security]);
      if (!pairs.has(key)) pairs.set(key, { source: {}, destination: {}, flow });
      const sums = pairs.get(key)[flow.reporter];
      for (const name of ["open", "opened", "failed", "denied", "connections_per_s", "failures_per_s", "bytes_per_s"]) {
        if (flow[name] !== null) sums[name] = (sums[name] || 0) + flow[name];
      }
    }
    return [...pairs].map(([key, { source, destination, flow }]) => {
      const edge = { key, source: flow.source, destination: flow.destination, security: flow.security };
      for (const name of new Set([...Object.keys(source), ...Object.keys(destination)])) {
        edge[name] = Math.max(source[name] || 0, destination[name] || 0);
      }
      const rates = edge.connections_per_s ? [`${perSecond(edge.connections_per_s)}`] : [];
      if (edge.bytes_per_s >= 1) rates.push(`${bytes(edge.bytes_per_s)}/s`);
      edge.label = rates.join(", ") || (edge.open ? `${number(edge.open)} open` : "");
      edge.trouble = edge.denied ? `${number(edge.denied)} denied`
        : edge.failed ? `${number(edge.failed)} failed` : "";
      return edge;
    });
  }
  function describe(workload) {
    return [
      workload.namespace ? `${workload.name} in ${workload.namespace}` : workload.name,
      workload.address && workload.address !== workload.name ? `address ${workload.address}` : "",
      workload.identity ? `identity ${workload.identity}` : "no identity",
      workload.here ? "on this node" : "", workload.state,
    ].filter(Boolean).join(", ");
  }
  const graph = Graph.create($("graph"), describe, choose);

  function choose(key) {
    chosen = chosen === key ? null : key;
    $("clear").hidden = !chosen;
    if (last) showMesh(last);
  }
  $("clear").addEventListener("click", () => choose(chosen));

  function showMesh(data) {
    const workloads = new Map(data.workloads.shown.map((each) => [each.key, each]));
    if (chosen && !workloads.has(chosen)) { chosen = null; $("clear").hidden = true; }
    const edges = merged(data.flows.shown);
    const sum = (name) => edges.reduce((total, edge) => total + (edge[name] || 0), 0);
    const known = edges.some((edge) => edge.connections_per_s !== undefined);
    const expiries = data.certificates.shown.map((each) => each.expires_s).filter((each) => each !== null);
    const soonest = expiries.length ? Math.min(...expiries) - data.time_s : null;
    tiles("tiles", [
      ["New connections", known ? perSecond(sum("connections_per_s")) : "–"],
      ["Bytes", known ? `${bytes(sum("bytes_per_s"))}/s` : "–"],
      ["Open connections", number(data.connections.shown.length + data.connections.left_out)],
      ["Failures", known ? perSecond(sum("failures_per_s")) : "–", sum("failures_per_s") > 0],
      ["In plain text", `${edges.filter((edge) => edge.security === "plain").length} of ${edges.length} pairs`],
      ["Next certificate expires", soonest === null ? "–" : soonest > 0 ? `in ${span(soonest).replace(/^(\d+ \S+) .*/, "$1")}` : "expired",
        soonest !== null && soonest < 3600],
    ]);
    graph.draw(data.workloads.shown, edges, chosen);
    const busy = new Set(edges.flatMap((edge) => [edge.source, edge.destination]));
    const idle = data.workloads.shown.filter((each) => !busy.has(each.key));
    const line = $("idle");
    const print = JSON.stringify(idle);
    if (line.dataset.print !== print) {
      line.dataset.print = print;
      line.replaceChildren();
      if (idle.length) line.append("On this node, without traffic: ");
      for (const each of idle) {
        child(line, "span", each.state ? "bad" : "", each.state ? `${each.name}: ${each.state}` : each.name).title = describe(each);
      }
    }
    const name = (key) => {
      const workload = workloads.get(key);
      return { text: workload.name, sub: [workload.namespace, workload.address !== workload.name ? workload.address : ""].filter(Boolean).join(" · "), title: describe(workload) };
    };
    const flows = data.flows.shown.filter((flow) => !chosen || flow.source === chosen || flow.destination === chosen);
    fill("flows", flows.map((flow) => [
      name(flow.source), name(flow.destination), flow.service || "–", security(flow.security),
      flow.reporter === "source" ? "client's side" : "server's side",
      num(number(flow.open)), num(perSecond(flow.connections_per_s)),
      num(flow.bytes_per_s === null ? "–" : `${bytes(flow.bytes_per_s)}/s`),
      num(number(flow.opened)), num(bytes(flow.bytes_sent + flow.bytes_received)),
      num(number(flow.failed), flow.failed), num(number(flow.denied), flow.denied),
    ]), "No traffic has been seen yet.");
    const since = data.facts.counted_since_s;
    setText($("since"), since ? `counted since ${moment(since)}, when this page was opened`
      : `since the proxy started, ${span(data.facts.uptime_s)} ago`);
    rest("flows", data.flows, "pairs");
  }

  // Connections

  function showConnections(data) {
    const directions = [...new Set(data.connections.shown.map((each) => each.direction))].sort();
    const select = $("direction");
    const known = [...select.options].map((option) => option.value);
    for (const direction of directions) if (!known.includes(direction)) child(select, "option", "", direction);
    const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = data.connections.shown.filter((each) => {
      if (select.value && each.direction !== select.value) return false;
      if ($("security").value && each.security !== $("security").value) return false;
      const text = [each.source, each.source_name, each.destination, each.destination_name, each.next_hop, each.identity,
        each.protocol, each.direction].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    setText($("matches"), `${number(found.length)} of ${number(data.connections.shown.length)} shown`);
    fill("connections-table", found.map((each) => [
      each.direction, { text: each.source, sub: each.source_name, className: "nowrap" },
      { text: each.destination, sub: each.destination_name }, { text: each.next_hop || "–", sub: each.protocol },
      security(each.security), { text: each.identity ? short(each.identity) : "–", title: each.identity },
      num(span(each.age_s)), num(bytes(each.bytes_sent)), num(bytes(each.bytes_received)),
      { text: "Explain", label: `Explain ${each.source} to ${each.destination}`, act: () => explainConnection(each, data) },
    ]), data.connections.shown.length ? "No connection matches." : "No connection is open.");
    rest("connections", data.connections, "connections");
  }
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  for (const id of ["filter", "direction", "security"]) {
    $(id).addEventListener("input", () => last && showConnections(last));
  }

  // Policies, certificates, configuration

  function showPolicies(data) {
    fill("denials", data.denials.shown.map((each) => [
      { text: ago(each.last_s, data.time_s), title: moment(each.last_s), className: "nowrap" }, each.place,
      { text: each.source, sub: each.address !== each.source ? `last from ${each.address}` : "" },
      { text: each.identity ? short(each.identity) : "–", title: each.identity },
      each.destination, each.reason, num(number(each.count), true),
    ]), "No connection has been denied.");
    rest("denials", data.denials, "pairs");
    fill("policies-table", data.policies.shown.map((each) => [
      each.name, each.action || "–", each.scope || "–", each.mode,
      num(number(each.allowed)), num(number(each.denied), each.denied && ["enforced", "implied"].includes(each.mode)), num(number(each.ended)),
      { text: ago(each.last_s, data.time_s), title: moment(each.last_s), className: "nowrap" },
      each.faults.length ? { text: each.faults.join("; "), className: "warn" } : "–",
    ]), "There are no policies.");
    rest("policies", data.policies, "policies");
  }
  function showCertificates(data) {
    fill("certificates-table", data.certificates.shown.map((each) => {
      const left = each.expires_s === null ? null : each.expires_s - data.time_s;
      const life = each.expires_s === null ? 1 : each.expires_s - each.valid_from_s;
      return [
        { text: short(each.identity), sub: each.identity === short(each.identity) ? "" : each.identity },
        { text: each.state, className: each.state === "Available" ? "" : "bad" },
        left === null ? "–" : left <= 0 ? { text: "expired", className: "nowrap bad" }
          : { text: span(left), className: left < life / 10 ? "nowrap warn" : "nowrap" },
        { text: moment(each.expires_s), className: "nowrap" }, { text: moment(each.valid_from_s), className: "nowrap" },
        { text: each.serial || "–", className: "serial" }, each.used_by || "–",
      ];
    }), "There are no certificates.");
    rest("certificates", data.certificates, "certificates");
  }
  function showConfiguration(data) {
    tiles("totals", [
      ...Object.entries(data.facts.totals).map(([name, value]) => [name[0].toUpperCase() + name.slice(1), number(value)]),
      ["Running for", span(data.facts.uptime_s)],
    ]);
    fill("sources", data.sources.shown.map((each) => [
      each.name, each.address,
      each.connected === null ? "–" : each.connected ? { text: "connected", tag: "mtls" }
        : { text: each.away_s ? `away for ${span(each.away_s)}` : "not connected", className: "bad" },
      { text: each.updated_s === null ? "–" : ago(each.updated_s, data.time_s), title: moment(each.updated_s) },
      num(number(each.updates)),
    ]), "Nothing is configured.");
    fill("refusals", data.refusals.shown.map((each) => [
      each.kind, { text: each.name, className: "bad" }, each.reason,
    ]), "No resource was refused.");
    rest("refusals", data.refusals, "resources");
  }

  // Explain

  const form = $("question");
  let prepared = false;

  function prepare(data) {
    const istio = data.facts.dialect === "istio";
    if (!prepared) {
      prepared = true;
      $("way").hidden = !istio;
      $("at").hidden = istio;
      for (const [name, value] of Object.entries(data.facts.question)) form.elements[name].placeholder = value;
    }
    const fillList = (id, values) => {
      const wanted = [...new Set(values.filter(Boolean))].sort();
      const print = JSON.stringify(wanted);
      if ($(id).dataset.print === print) return;
      $(id).dataset.print = print;
      $(id).replaceChildren(...wanted.map((value) => {
        const option = document.createElement("option");
        option.value = value;
        return option;
      }));
    };
    fillList("names", [
      ...data.workloads.shown.map((each) => each.address),
      ...data.connections.shown.map((each) => (istio ? each.source_name : "")),
    ]);
    fillList("identities", data.workloads.shown.map((each) => each.identity));
  }
  function explainConnection(connection, data) {
    const istio = data.facts.dialect === "istio";
    const inbound = connection.direction === "inbound";
    form.elements.source.value = connection.source;
    form.elements.destination.value = istio && inbound ? connection.next_hop : connection.destination;
    form.elements.identity.value = (istio ? inbound : connection.direction !== "outbound" && connection.source_name)
      ? connection.identity : "";
    if (istio) form.elements.direction.value = inbound ? "inbound" : "outbound";
    else {
      form.elements.listener.value = connection.direction;
      if (!connection.protocol.startsWith("HTTP")) form.elements.identity.value = "";
    }
    location.hash = "explain";
    form.requestSubmit();
  }
  // One answer as a tree: keys in the order of the answer, lists as items.
  function tree(parent, value, name) {
    const item = child(parent, "li");
    if (name !== undefined) child(item, "span", "name", `${name.replaceAll("_", " ")}: `);
    if (value === null || typeof value !== "object") {
      item.append(value === true ? "yes" : value === false ? "no" : value === null ? "–" : String(value));
      return;
    }
    const entries = Array.isArray(value) ? value.map((each) => [undefined, each]) : Object.entries(value);
    if (!entries.length) { item.append("none"); return; }
    if (name === undefined) item.className = "item";
    const list = child(item, "ul");
    for (const [key, each] of entries) tree(list, each, key);
  }
  function kindOf(verdict) {
    if (verdict.startsWith("allowed, but")) return "warn";  // not by each endpoint
    return verdict.startsWith("allowed") ? "good" : "bad";
  }
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const query = new URLSearchParams();
    for (const [name, value] of new FormData(form)) {
      const field = form.elements[name];
      if (value.trim() && !field.closest("label").hidden) query.set(name, value.trim());
    }
    const box = $("answer");
    let status = 0, text = "";
    try {
      const answer = await fetch(`/explain?${query}`, { headers: { accept: "application/json" } });
      status = answer.status;
      text = await answer.text();
    } catch (error) {
      text = `The proxy did not answer: ${error.message}`;
    }
    box.hidden = false;
    box.replaceChildren();
    if (status !== 200) {
      child(box, "p", "verdict bad", "No answer");
      child(box, "p", "message", text.trim());
      return;
    }
    const { verdict, ...others } = JSON.parse(text);
    child(box, "p", `verdict ${kindOf(String(verdict))}`, `Verdict: ${verdict}`);
    const list = child(box, "ul", "tree");
    for (const [name, value] of Object.entries(others)) tree(list, value, name);
  });

  // The frame

  function count(id, value, bad) {
    setText($(`count-${id}`), value ? number(value) : "");
    $(`count-${id}`).classList.toggle("bad", Boolean(bad && value));
  }
  function show(data) {
    last = data;
    const facts = data.facts;
    setText($("node"), facts.node);
    document.title = facts.node ? `${facts.node} – ztunnel` : "ztunnel";
    setText($("dialect"), facts.dialect === "istio" ? "Istio" : "Envoy's dialect");
    setText($("version"), facts.version);
    count("connections", data.connections.shown.length + data.connections.left_out);
    const implied = data.policies.shown.filter((each) => each.mode === "implied").length; // no policy of its own
    count("policies", data.policies.shown.length - implied + data.policies.left_out);
    const late = data.certificates.shown.filter((each) => each.state !== "Available" || each.expires_s < data.time_s);
    count("certificates", late.length || data.certificates.shown.length + data.certificates.left_out, late.length);
    count("refusals", data.refusals.shown.length + data.refusals.left_out, true);
    const lost = data.sources.shown.find((each) => each.connected === false);
    if (lost) pill(`${lost.name} not connected`, "bad");
    else pill(facts.state, facts.ready ? "good" : "bad");
    showMesh(data);
    showConnections(data);
    showPolicies(data);
    showCertificates(data);
    showConfiguration(data);
    prepare(data);
  }
  function pill(text, kind) {
    setText($("state"), text);
    $("state").className = `pill ${kind}`;
  }
  function follow() {
    if (stream || paused || document.hidden) return;
    stream = new EventSource("/ui/events");
    stream.addEventListener("message", (event) => {
      receivedAt = Date.now();
      show(JSON.parse(event.data));
    });
    stream.addEventListener("error", () => {
      pill("no answer from the proxy", "bad");
      if (stream && stream.readyState === EventSource.CLOSED) {
        // The browser gives up after an answer other than 200, such as that too many pages are open.
        stream = null;
        setTimeout(follow, 5000);
      }
    });
  }
  function leave() {
    if (stream) stream.close();
    stream = null;
  }
  setInterval(() => {
    const seconds = Math.round((Date.now() - receivedAt) / 1000);
    setText($("age"), paused ? "paused" : !receivedAt ? "" : seconds < 5 ? "live" : `${span(seconds)} old`);
  }, 1000);
  document.addEventListener("visibilitychange", () => (document.hidden ? leave() : follow()));
  $("pause").addEventListener("click", () => {
    paused = !paused;
    $("pause").setAttribute("aria-pressed", String(paused));
    setText($("pause"), paused ? "Resume" : "Pause");
    if (paused) leave(); else follow();
  });

  const THEMES = ["auto", "light", "dark"];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let theme = "auto";
  try { theme = localStorage.getItem("theme") || "auto"; } catch { /* storage is off */ }
  function paint() {
    if (!THEMES.includes(theme)) theme = "auto";
    document.documentElement.dataset.theme = theme === "auto" ? (dark.matches ? "dark" : "light") : theme;
    setText($("theme"), `Theme: ${theme}`);
  }
  $("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try { localStorage.setItem("theme", theme); } catch { /* for this page only */ }
    paint();
  });
  dark.addEventListener("change", paint);
  paint();

  function turn() {
    const view = VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "mesh";
    for (const id of VIEWS) $(id).hidden = id !== view;
    for (const link of document.querySelectorAll("nav a")) {
      if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    scrollTo(0, 0);
    if (last) showMesh(last);  // a hidden graph has no width
  }
  addEventListener("hashchange", turn);
  addEventListener("resize", () => last && showMesh(last));
  turn();
  follow();
})();
