"""The environment page in Chromium: it asks for the key, shows the game, and follows it by itself."""

import httpx
import pytest

from tests.browser.watched import FITS, PHONE
from tests.conftest import TASK_APP_KEY, task_app

KEY = TASK_APP_KEY.get_secret_value()


@pytest.fixture(scope="module")
def game():
    """The service, a client with the key, and an environment whose first decision collects wood."""
    with httpx.Client(base_url=task_app(), headers={"X-API-Key": KEY}) as http:
        env_id = http.post("/env/create", json={"env_name": "crafter", "seed": 17}).json()["env_id"]
        step(http, env_id, "move_right", "move_right", "move_right", "do")
        yield http, env_id, f"{str(http.base_url).rstrip('/')}/env/{env_id}/view"


def step(http, env_id, *actions):
    call = {"tool": "interact_many", "args": {"actions": list(actions)}}
    assert http.post("/env/step", json={"env_id": env_id, "tool_calls": [call]}).status_code == 200


def test_without_the_key_the_browser_asks_for_a_password_and_shows_nothing(browser, game):
    _, _, url = game
    # Headless, none can be typed: the browser gives up where a window would open.
    with pytest.raises(Exception, match="ERR_INVALID_AUTH_CREDENTIALS"):
        browser.new_page().goto(url)
    wrong = browser.new_context(http_credentials={"username": "me", "password": "wrong"})
    assert wrong.new_page().goto(url).status == 401


def test_the_page_follows_the_game_and_says_when_it_is_gone(browser, game):
    http, env_id, url = game
    context = browser.new_context(http_credentials={"username": "me", "password": KEY})
    page, complaints, elsewhere = context.new_page(), [], []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text) if "Content Security" in line.text else None)
    page.on("request", lambda request: elsewhere.append(request.url))
    page.goto(url)
    assert page.title() == "crafter, world 17"
    page.set_viewport_size(PHONE)
    assert page.evaluate(FITS)
    assert page.locator("img").evaluate("image => image.complete && image.naturalWidth") == 144
    assert page.locator(".first").inner_text() == "collect_wood"
    assert "CRAFTER GAME STATE" in page.locator("pre").inner_text()
    # The style of the page was let in by its policy.
    assert page.locator("img").evaluate("image => getComputedStyle(image).imageRendering") == "pixelated"

    step(http, env_id, "move_down", "move_right", "do")
    page.locator(".again").wait_for()  # without a reload: the page asks by itself
    assert page.locator("tbody tr").count() == 2

    http.post("/env/terminate", json={"env_id": env_id})
    page.locator("#live.gone").wait_for()
    assert "is gone" in page.locator("#live").inner_text()
    assert page.locator("tbody tr").count() == 2
    assert complaints == []
    assert {request for request in elsewhere if not request.startswith("data:")} == {url}
