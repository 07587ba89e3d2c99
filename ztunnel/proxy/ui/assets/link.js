// The state of the page in the fragment of its address, such as "#flows?pod=default/web&verdict=dropped", so that a
// link shows what its sender saw. A view registers what it keeps: read() returns it as {name: text}, and
// apply(parameters) sets it.

const kept = new Map();

export function keep(view, read, apply) {
  kept.set(view, { read, apply });
}

// Return the view of a fragment and its parameters, which are null without any.
export function parse(fragment, views) {
  const [, name, query] = /^#?([^?]*)(?:\?(.*))?$/s.exec(fragment) || [];
  return { view: views.includes(name) ? name : views[0], parameters: query ? new URLSearchParams(query) : null };
}

export function format(view, state) {
  const query = new URLSearchParams(Object.entries(state).filter(([, value]) => value)).toString();
  return query ? `#${view}?${query}` : `#${view}`;
}

// Apply a fragment to its view and return the view. A link of the navigation has no parameters and changes no state.
export function open(fragment, views) {
  const { view, parameters } = parse(fragment, views);
  const own = kept.get(view);
  if (own && parameters) own.apply(parameters);
  note(view);
  return view;
}

// Write the state of a view into the address.
export function note(view) {
  const own = kept.get(view);
  const fragment = format(view, own ? own.read() : {});
  // The first view needs no fragment, and one that comes while the page loads would move the focus.
  if (!location.hash && !fragment.includes("?")) return;
  if (location.hash !== fragment) history.replaceState(null, "", fragment);
}
