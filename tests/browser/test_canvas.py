"The live picture on a bare page: packets of a session, without a notebook server."
import base64, contextlib, json

import numpy as np
import pytest

from conftest import SHOTS, open_browser
from esper_nb.show import Frame, FrameSource, Incident, Session, asset_path, session_packet

# What the picture is given by anywidget; `dead` is a kernel that is gone.
PAGE = """async ({script, packet}) => {
  document.body.innerHTML =
    `<div class="esper"><button class="widget-button">Advance</button><div id="el"></div></div>`;
  const heard = {}, state = {lane: 0, height: 452};
  window.texts = [];
  window.sent = [];
  window.clicks = 0;
  document.querySelector("button").addEventListener("click", () => window.clicks++);
  const fill = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const {width} = this.measureText(text), left = {right: width, center: width / 2}[this.textAlign] ?? 0;
    window.texts.push({text, left: x - left, right: x - left + width, top: y - 6, bottom: y + 6});
    fill.call(this, text, x, y);
  };
  const clear = CanvasRenderingContext2D.prototype.clearRect;
  CanvasRenderingContext2D.prototype.clearRect = function (x, y, w, h) {
    if (x === 0 && y === 0 && this.canvas.isConnected) window.texts = [];       // a frame begins
    clear.call(this, x, y, w, h);
  };
  const model = {
    get: name => state[name], set: (name, value) => (state[name] = value), save_changes() {}, off() {},
    on: (name, act) => (heard[name] = act),
    send(message) {
      if (window.dead) throw new Error("Cannot send");
      window.sent.push(message.kind);
    },
  };
  window.tell = (name, ...values) => heard[name](...values);
  window.deliver = ({meta, buffers}) => {
    const views = buffers.map(text => new DataView(Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer));
    heard["msg:custom"]({kind: "packet", number: 1, ...meta}, views);
    return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  };
  const {default: widget} = await import(URL.createObjectURL(new Blob([script], {type: "text/javascript"})));
  widget.render({model, el: document.getElementById("el")});
  if (packet) await window.deliver(packet);
}"""

def packet(session, seen=None):
    "A packet as the page's script wants it."
    made = session_packet(session, seen)
    return dict(meta=json.loads(json.dumps(made.meta)), buffers=[base64.b64encode(b).decode() for b in made.buffers])

@contextlib.contextmanager
def picture(session, tmp_path, width=1000):
    "A page with the picture of a session, or without an answer from the kernel."
    with open_browser(tmp_path, (width, 600)) as browser:
        page = browser.page
        for name in ("panel.css", "canvas.css"): page.add_style_tag(path=asset_path(name))
        page.evaluate(PAGE, dict(script=asset_path("canvas.js").read_text(encoding="utf-8"),
                                 packet=None if session is None else packet(session)))
        yield page
        assert browser.errors == []

def stepped(frames, lanes=2):
    "A session of given frames, all done."
    session = Session(FrameSource(frames, lanes))
    session.start()
    session.wait()
    return session

def limits(lanes, **columns):
    "Limits of every lane, as a frame has them."
    names = ("limit", "absolute", "sigma", "multiple", "rise")
    return np.tile([columns.get(k, np.nan) for k in names], (lanes, 1))

def overlaps(a, b):
    return a["left"] < b["right"] and b["left"] < a["right"] and a["top"] < b["bottom"] and b["top"] < a["bottom"]

def test_no_number_is_cut_by_the_pictures_edge(tmp_path):
    bounds = limits(2, limit=.0123456, absolute=4.605, multiple=.0123456, rise=.004371)
    session = stepped(Frame(np.full((4, 2), .004), limits=bounds) for _ in range(9))
    with picture(session, tmp_path) as page:
        width = page.locator("canvas").evaluate("e => e.clientWidth")
        texts = page.evaluate("window.texts")
        page.screenshot(path=SHOTS/"canvas-labels.png")
    named = [t["text"] for t in texts if "0.0044" in t["text"]]
    assert named and all(t["left"] >= 0 and t["right"] <= width for t in texts), [
        t for t in texts if t["right"] > width]
    session.close()

def test_one_tiny_loss_does_not_wash_out_the_lanes(tmp_path):
    frames = [Frame(np.array([[2., .1]])) for _ in range(60)]
    frames[30] = Frame(np.array([[2., 1e-6]]))
    session = stepped(frames)
    with picture(session, tmp_path) as page:
        rows = [next(t for t in page.evaluate("window.texts") if t["text"] == name) for name in ("▸ 0", "1")]
        shades = page.evaluate("""rows => rows.map(y => [...document.querySelector("canvas").getContext("2d")
          .getImageData(300, y, 1, 1).data])""", [row["top"] + 6 for row in rows])
    session.close()
    assert np.abs(np.subtract(*shades)).max() > 60, shades      # high losses beside low ones

def test_a_run_that_is_done_fills_the_picture(tmp_path):
    session = stepped(Frame(np.full((4, 2), 1.)) for _ in range(50))
    with picture(session, tmp_path) as page:
        ticks = [t for t in page.evaluate("window.texts") if t["text"] in ("0", "100", "200")]
        wide = page.locator("canvas").evaluate("e => e.clientWidth")
    session.close()
    assert len(ticks) >= 3 and max(t["right"] for t in ticks) > .85 * wide, (ticks, wide)

def test_the_key_shows_what_occurs(tmp_path):
    session = stepped(Frame(np.full((4, 2), 1.), limits=limits(2)) for _ in range(3))
    with picture(session, tmp_path) as page:
        key = page.locator(".esper-key")
        assert not {"anomaly", "snapshot", "recovered", "fault", "limit"} & set(key.inner_text().split())
        session.history.mark_fault("nan", 0, 1)
        page.evaluate("p => window.deliver(p)", packet(session))
        assert "fault" in key.inner_text() and "nan" in [t["text"] for t in page.evaluate("window.texts")]
        title = page.locator(".esper-heads abbr").first.get_attribute("title")
        assert title.startswith("the unit of a cross-entropy loss")
    session.close()

def test_names_are_not_written_over_each_other(tmp_path):
    frames = [Frame(np.full((4, 2), .5), limits=limits(2, limit=3.)) for _ in range(60)]
    session = stepped(frames)
    for number, x in enumerate((60, 66, 80, 100, 104), 1):
        session.history.incidents.append(Incident(
            number=number, lane=0, reason="non-finite", action="rollback", x=x, end=x + 6, back=x - 10, loss="nan",
            target=.5, rollbacks_left=3, recovered=x + 8))
        session.history.mark_fault("corrupt-batch", 0, x - 241)
    for width in (1000, 500):
        with picture(session, tmp_path/str(width), width) as page:
            texts = page.evaluate("window.texts")
            page.screenshot(path=SHOTS/f"canvas-names-{width}.png")
        hits = [(a["text"], b["text"]) for i, a in enumerate(texts) for b in texts[:i] if overlaps(a, b)]
        assert hits == [] and sum("lost" in t["text"] for t in texts) >= 1, hits
    session.close()

def test_a_pressed_button_waits_for_its_answer_and_takes_no_second_click(tmp_path):
    session = stepped(Frame(np.ones((1, 2))) for _ in range(3))
    with picture(session, tmp_path) as page:
        button = page.locator("button.widget-button")
        button.click(); button.click(); button.click()
        assert page.evaluate("window.clicks") == 1 and "esper-queued" in button.get_attribute("class")
        session.answered += 1
        page.evaluate("p => window.deliver(p)", packet(session))
        assert "esper-queued" not in button.get_attribute("class")
        button.click()
        assert page.evaluate("window.clicks") == 2
    session.close()

@pytest.mark.parametrize("notified", [True, False])
def test_a_panel_whose_kernel_is_gone_says_so_under_a_veil(tmp_path, notified):
    session = stepped(Frame(np.ones((1, 2))) for _ in range(3))
    with picture(session, tmp_path) as page:
        assert page.locator(".esper-gone").count() == 0
        page.evaluate("window.dead = true")
        if notified: page.evaluate("window.tell('comm_live_update')")
        else: page.mouse.move(300, 300)                             # whoever comes to the panel finds out
        page.locator(".esper-gone").wait_for(timeout=5000)
        assert "The kernel is gone: run this cell again" in page.locator(".esper-gone").inner_text()
        page.screenshot(path=SHOTS/"canvas-gone.png")
        page.evaluate("() => { window.dead = false; window.tell('comm_live_update') }")
        page.locator(".esper-gone").wait_for(state="detached", timeout=5000)
    session.close()

@pytest.mark.parametrize("stored", [True, False])
def test_a_panel_that_no_kernel_answers_says_what_to_do(tmp_path, stored):
    with picture(None, tmp_path) as page:
        assert "waiting for the kernel" in page.locator(".esper-key").inner_text()
        if stored:                                                  # what JupyterLab marks a widget without a comm with
            page.evaluate("document.getElementById('el').classList.add('jupyter-widgets-disconnected')")
            page.locator(".esper-gone").wait_for(timeout=2000)
            assert "Not connected to a kernel: run this cell again" in page.locator(".esper-gone").inner_text()
        else: page.locator(".esper-key", has_text="run this cell again").wait_for(timeout=10_000)
        page.screenshot(path=SHOTS/f"canvas-waiting-{stored}.png")
        session = stepped(Frame(np.ones((1, 2))) for _ in range(3))
        page.evaluate("p => window.deliver(p)", packet(session))
        page.locator(".esper-gone").wait_for(state="detached", timeout=2000)
        assert "lane 0" in page.locator(".esper-key").inner_text()
    session.close()

def on_page(page):
    "Two frames later."
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

def axis(page): # numbers below the picture
    texts = page.evaluate("window.texts")
    foot = max(t["top"] for t in texts if t["text"].isdigit())
    return sorted(int(t["text"]) for t in texts if t["text"].isdigit() and abs(t["top"] - foot) < 2)

def long_run(lanes=2):
    "A session with an incident of lane 1 at batch 140."
    session = stepped([Frame(np.full((4, lanes), .5), limits=limits(lanes, limit=3.)) for _ in range(60)], lanes)
    session.history.note("verdict", "lane 1: non-finite")
    session.history.incidents.append(Incident(
        number=session.history.notes[-1].number, lane=1, reason="non-finite", action="rollback", x=140, end=146,
        back=130, loss="nan", target=.5, rollbacks_left=3, recovered=148))
    return session

def test_a_stretch_is_chosen_by_dragging_or_by_keys_and_left_by_a_double_click(tmp_path):
    session = long_run()
    with picture(session, tmp_path) as page:
        whole, box = axis(page), page.locator("canvas").bounding_box()
        page.mouse.move(box["x"] + 300, box["y"] + 100)
        page.mouse.down()
        page.mouse.move(box["x"] + 500, box["y"] + 120, steps=4)
        page.mouse.up()
        on_page(page)
        near = axis(page)
        assert whole[-1] >= 200 and 60 <= near[0] and near[-1] <= 150, (whole, near)
        assert page.locator(".esper-range button[aria-pressed=true]").count() == 0
        page.screenshot(path=SHOTS/"canvas-zoomed.png")
        page.locator("canvas").focus()
        page.keyboard.press("ArrowRight")
        on_page(page)
        assert axis(page)[-1] > near[-1]
        page.locator("canvas").dblclick(position=dict(x=200, y=100))
        on_page(page)
        assert axis(page) == whole
        page.keyboard.press("+")
        on_page(page)
        assert axis(page) != whole
        page.keyboard.press("Escape")
        on_page(page)
        assert axis(page) == whole
    session.close()

def test_a_click_on_an_incident_goes_there_and_tells_what_happened(tmp_path):
    session = long_run()
    with picture(session, tmp_path) as page:
        assert page.locator(".esper-story").is_hidden()
        texts, box = page.evaluate("window.texts"), page.locator("canvas").bounding_box()
        row = max((t for t in texts if t["text"] == "1"), key=lambda t: t["top"]) # the lowest: not that of an axis
        x = 62 + (box["width"] - 62 - 112) * 140 / 240
        page.mouse.click(box["x"] + x, box["y"] + row["top"] + 6)
        on_page(page)
        assert "Lane 1, batch 140: non-finite" in page.locator(".esper-story").inner_text()
        shown = axis(page)
        assert 100 <= shown[0] and shown[-1] <= 180, shown
        page.locator(".esper-range button", has_text="whole run").click()
        on_page(page)
        assert page.locator(".esper-story").is_hidden()
    session.close()

def test_a_metric_is_a_second_curve_and_costs_the_losses_no_room(tmp_path):
    session = long_run()
    with picture(session, tmp_path) as page:
        height, choices = page.locator("canvas").bounding_box()["height"], page.locator(".esper-metric")
        assert choices.is_hidden()
        session.log(lr=.125, kappa=[.5, .75])
        page.evaluate("p => window.deliver(p)", packet(session))
        assert choices.locator("option").all_inner_texts() == ["no second curve", "lr", "kappa"]
        assert page.locator("canvas").bounding_box()["height"] > height + 60 and choices.input_value() == "lr"
        assert "0.13" in [t["text"] for t in page.evaluate("window.texts")]
        choices.select_option("kappa")
        on_page(page)
        assert {"0.5", "0.75"} <= {t["text"] for t in page.evaluate("window.texts")}
        page.screenshot(path=SHOTS/"canvas-metric.png")
        choices.select_option("")
        on_page(page)
        assert page.locator("canvas").bounding_box()["height"] == height
    session.close()

def test_sixty_lanes_leave_the_losses_their_room(tmp_path):
    session = long_run(60)
    with picture(session, tmp_path, 800) as page:
        texts = page.evaluate("window.texts")
        lanes = [t for t in texts if t["text"] in map(str, range(0, 60, 8)) and t["right"] < 60]
        titles = page.locator(".esper-heads div").evaluate_all("all => all.map(e => e.getBoundingClientRect().top)")
        hits = [(a["text"], b["text"]) for i, a in enumerate(lanes) for b in lanes[:i] if overlaps(a, b)]
        assert titles[1] - titles[0] > 200 and hits == []
    session.close()

def test_a_screen_reader_hears_what_a_part_and_a_button_are(tmp_path):
    session = stepped(Frame(np.ones((1, 2))) for _ in range(3))
    with picture(session, tmp_path) as page:
        page.evaluate("""() => {
          const bar = "<div class='esper-bar'><button class='widget-button esper-fault'>nan</button></div>";
          document.querySelector(".esper").insertAdjacentHTML("afterbegin", bar + bar) }""")
        page.evaluate("p => window.deliver(p)", packet(session))
        assert page.get_by_role("button", name="provoke nan", exact=True).count() == 2
        assert page.get_by_role("group", name="lane and faults").count() == 1
        assert page.get_by_role("img", name="lane 0").count() == 1
    session.close()
