"""`jaxcomp watch`: the text, the server's answers, and the page in a browser."""

import http.client
import json
import threading

import pytest
from helpers import browser
from helpers.round_file import HOSTILE, end, round_, start, write

import jaxcomp_command
from jaxcomp.cli import page as page_, watch
from jaxcomp.telemetry.rounds import Rounds


@pytest.fixture
def served(tmp_path):
    """The server of a page, in a thread until the test ends."""
    write(tmp_path, start(), *(round_(n) for n in range(5)))
    with page_.Page(Rounds(tmp_path)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def ask(server, path="/", method="GET", host=None, **headers):
    """The status, headers and body of an answer."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    for name in [f"127.0.0.1:{port}"] if host is None else host:
        connection.putheader("Host", name)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def test_the_page_takes_nothing_from_elsewhere(served):
    """Its policy allows its own files only, and it refers to no others."""
    status, headers, body = ask(served)
    assert status == 200
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert policy["trusted-types"] == "'none'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "Python" not in headers["Server"]
    everything = b"".join(ask(served, path)[2] for path in served.files)
    assert everything.count(b"http") == everything.count(b"http://www.w3.org/2000/svg") == 1
    assert b"<script>" not in body
    for sink in (b"innerHTML", b"outerHTML", b"insertAdjacent", b"document.write", b"eval("):
        assert sink not in everything


def test_hosts_that_are_not_the_loopback_are_refused(served):
    port = served.server_address[1]
    for host in ("127.0.0.1", "localhost", f"LocalHost:{port}", "[::1]:8000", "127.0.0.1:9000"):
        assert ask(served, host=[host])[0] == 200
    own = f"127.0.0.1:{port}"
    foreign = ["evil.com", "evil.com:80", f"{own}.evil.com", "127.0.0.1@evil.com", "", "0.0.0.0"]
    for hosts in (*([host] for host in foreign), [], [own, "evil.com"], [own, own]):
        for path in ("/", "/rounds?epoch=0&after=0"):
            status, _, body = ask(served, path, host=hosts)
            assert status == 403, hosts
            assert b"round" not in body.replace(b"rounds", b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "X"])
def test_only_get_is_answered(served, method):
    status, headers, body = ask(served, "/rounds?epoch=0&after=0", method)
    assert (status, headers["Allow"]) == (405, "GET")
    assert b"epoch" not in body


@pytest.mark.parametrize(
    "path", ["/../pyproject.toml", "/watch.py", "/rounds.jsonl", "//evil.com/", "/watch_page/"]
)
def test_there_are_no_other_files(served, path):
    assert ask(served, path)[0] == 404


@pytest.mark.parametrize("query", ["epoch=x", "after=-1", "epoch=1e3", f"after={'9' * 30}"])
def test_wrong_questions_are_refused(served, query):
    assert ask(served, f"/rounds?{query}")[0] == 400


def test_answers_have_what_is_new(served, tmp_path):
    status, headers, body = ask(served, "/rounds?epoch=0&after=0")
    assert (status, headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    first = json.loads(body)
    assert first["rounds"]["round"] == [0, 1, 2, 3, 4]
    write(tmp_path, round_(5), mode="a")
    path = f"/rounds?epoch={first['epoch']}&after=5"
    more = json.loads(ask(served, path)[2])
    assert more["rounds"]["round"] == [5]
    (tmp_path / "rounds.jsonl").unlink()
    assert ask(served, path)[0] == 503


def test_the_server_is_on_the_loopback_alone(served, tmp_path):
    assert served.server_address[0] == "127.0.0.1"
    assert served.address == f"http://127.0.0.1:{served.server_address[1]}/"
    with pytest.raises(ValueError, match="--port must be one that is free, or 0 for any"):
        page_.Page(Rounds(tmp_path), served.server_address[1])


def told(capsys, *argv):
    jaxcomp_command.main(["watch", *map(str, argv)])
    return capsys.readouterr().out


def test_the_text_says_who_is_there_late_or_refused(tmp_path, capsys):
    refused = [{"client": 1, "kind": "failed", "why": "\x1b[31mno disk\u202e"}]
    accepted = {"client": [0, 2], "age": [0, 3], "up": 10, "steps": 4, "seconds": 2.0}
    last = round_(4, refused=refused, accepted=accepted, away=[0])
    write(tmp_path, start(until=8), *(round_(n) for n in range(4)), last, end(41.0))
    text = told(capsys, tmp_path, "--once")
    assert "ended; 5 of 8 rounds; loss 8.6; 6 rounds a minute; 150 B up" in text
    lines = text.splitlines()
    assert [line.split()[:2] for line in lines[-3:]] == [
        ["0", "away"],
        ["1", "refused:"],
        ["2", "late:"],
    ]
    assert "1 failed (failed: \N{REPLACEMENT CHARACTER}[31mno disk" in text
    assert "\x1b" not in text
    found = json.loads(told(capsys, tmp_path, "--json"))
    assert [site["accepted"] for site in found["sites"]] == [5, 4, 4]


def test_a_silent_server_and_lost_lines_are_said(tmp_path):
    strangers = [{"client": None, "kind": "not asked"}]
    write(tmp_path, start(), *(round_(n, refused=strangers) for n in range(5)))
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write("nothing\n")
    rounds = Rounds(tmp_path)
    rounds.read()
    text = watch.about(rounds.status(400.0))
    assert "The server has written nothing for 6.0 min" in text
    assert "nodes that were not asked: 5 not asked" in text
    assert "1 lines of the file cannot be read" in text
    assert "ends at" not in text
    assert "ends at" in watch.about(rounds.status(41.0))


def test_wrong_folders_and_ports_are_told_in_a_line(tmp_path, capsys):
    for argv, said in (
        ([tmp_path], "`folder` must be that of a server's checkpoints"),
        ([tmp_path, "--port", "70000"], "--port must be a port from 0 to 65535, got '70000'"),
    ):
        with pytest.raises(SystemExit) as ended:
            told(capsys, *argv)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


@pytest.fixture
def chromium(tmp_path_factory):
    if browser.found() is None:
        pytest.skip("needs Chromium, and bash to start it")
    with browser.Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def test_texts_of_hostile_sites_stay_texts_in_a_browser(served, tmp_path, chromium):
    texts = list(HOSTILE.values())
    refused = [{"client": i, "kind": "failed", "why": text} for i, text in enumerate(texts)]
    nodes = {str(i): text for i, text in enumerate(texts)}
    more = {"loss": float("nan"), "refused": refused, "nodes": nodes}
    write(tmp_path, round_(5, **more), round_(6, loss=1e308), end(60.0, texts[1]), mode="a")
    for width, dark in ((1366, False), (420, True)):
        chromium.open(served.address, width, 900, dark)
        chromium.wait(f"document.querySelectorAll('#sites tr').length == {len(texts)}")
        cells = chromium.run("[...document.querySelectorAll('td.node')].map(td => td.textContent)")
        assert [cells[0], cells[1]] == texts[:2]
        assert chromium.run("document.querySelectorAll('td *, #alert *, #folder *').length") == 0
        assert chromium.run("document.querySelectorAll('script, img, iframe').length") == 1
        assert texts[1] in chromium.run("document.getElementById('alert').textContent")
        assert chromium.run("document.getElementById('state').textContent") == "failed"
        assert chromium.run("document.documentElement.scrollWidth") == width
        assert chromium.run("document.querySelector('#chart .curve').getAttribute('d')[0]") == "M"
        assert not [fault for fault in chromium.faults if "favicon" not in str(fault)]
    blocked = "try { document.body.innerHTML = '<b>'; 'open' } catch { 'blocked' }"
    assert chromium.run(blocked) == "blocked"


def test_a_browser_follows_the_training_and_sorts_its_sites(served, tmp_path, chromium):
    chromium.open(served.address)
    number = "document.querySelector('#numbers dd').textContent"
    assert chromium.wait(f"document.querySelector('#numbers dd') && {number}") == "5 of 100"
    write(tmp_path, round_(5, 2), *(round_(n, 1) for n in range(6, 2000)), mode="a")
    chromium.wait(f"{number} == '2,000 of 100'")
    path = "document.querySelector('#chart .curve').getAttribute('d')"
    assert 100 < chromium.run(f"{path}.split('L').length") <= 4 * 1366
    heads = "[...document.querySelectorAll('th button')]"
    click = f"{heads}.find(head => head.textContent == 'accepted').click()"
    order = "[...document.querySelectorAll('#sites td:first-child')].map(td => td.textContent)"
    assert chromium.run(order) == ["0", "1", "2"]
    for want in (["0", "1", "2"], ["2", "1", "0"]):
        chromium.run(click)
        assert chromium.run(order) == want
    (tmp_path / "rounds.jsonl").unlink()
    chromium.wait("document.getElementById('state').textContent == 'no answer'")
    assert "cannot read" in chromium.run("document.getElementById('alert').textContent")
