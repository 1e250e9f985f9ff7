// The live picture on a page of its own: what a widget's model is in a notebook is here a stream of events.

import widget from "./canvas.js";

const words = {
  waiting: "waiting for the run …",
  noAnswer: "no answer from the command that serves this page",
  gone: `<b>No connection: is the terminal closed?</b>
<span>The page goes on by itself when the connection is back. After a new <code>esper-nb watch … --web</code>
open the address that it prints.</span>`,
};

const buffer = text => new DataView(Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer);

class Stream {
  constructor(address) {
    this.words = words;
    this.heard = {};
    this.values = {lane: 0, height: Math.max(360, Math.min(620, Math.round(0.62 * innerHeight)))};
    this.source = new EventSource(address);
    this.source.onmessage = event => {
      const {buffers, ...message} = JSON.parse(event.data);
      this.heard["msg:custom"]?.({kind: "packet", ...message}, buffers.map(buffer));
      this.heard.comm_live_update?.();
    };
    this.source.onopen = () => { this.begun = true; };
    this.source.onerror = () => this.heard.comm_live_update?.();
  }

  get(name) { return this.values[name]; }
  set(name, value) {
    this.values[name] = value;
    this.heard["change:lane"]?.();
  }
  on(name, act) { this.heard[name] = act; }
  off(name) { delete this.heard[name]; }
  save_changes() {}

  // Nothing is sent: it only tells whether somebody serves this page.
  send() {
    if (this.begun && this.source.readyState !== EventSource.OPEN) throw new Error("no connection");
  }
}

// A list to choose the lane from, for whoever does not click into the picture.
function laneList(model, list, lanes, names) {
  if (list.options.length !== lanes) {
    const options = Array.from({length: lanes}, (_, lane) => new Option(names?.[lane] ?? `lane ${lane}`, lane));
    list.replaceChildren(...options);
  }
  list.value = model.get("lane");
}

function show(address) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => { document.body.dataset.jpThemeLight = String(!dark.matches); };
  dark.addEventListener("change", follow);
  follow();
  const model = new Stream(address), list = document.querySelector("#lane");
  widget.render({model, el: document.querySelector("#picture")});
  const {"msg:custom": packet, "change:lane": changed} = model.heard;
  model.heard["msg:custom"] = (message, buffers) => {
    packet(message, buffers);
    if (message.head) {
      laneList(model, list, message.head.lanes, message.head.names);
      list.parentElement.hidden = message.head.lanes === 1;
    }
  };
  model.heard["change:lane"] = () => {
    list.value = model.get("lane");
    changed();
  };
  list.onchange = () => model.set("lane", +list.value);
}

show(`events${location.search}`); // the address of the page holds the token
