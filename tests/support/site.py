"""Pages with one of everything, served on loopback."""

from __future__ import annotations

import asyncio

from aiohttp import web

SHOP = """<!doctype html><title>Shop</title>
<nav><ul><li><a href="/next">Next page</a></li><li><a href="/popup" target="_blank">Help window</a></li></ul></nav>
<h1>Order</h1><p>Fill in the <em>form</em>.</p>
<form id="order" onsubmit="event.preventDefault(); sent.textContent = [who.value, colour.value, gift.checked,
  note.value, paper.files[0] ? paper.files[0].name + ':' + paper.files[0].size : 'none'].join('|')">
 <label>Name <input id="who"></label>
 <select id="colour" aria-label="Colour"><option value="r">Red</option><option value="b">Blue</option></select>
 <label><input type="checkbox" id="gift"> As a gift</label>
 <textarea id="note" aria-label="Note"></textarea>
 <input type="file" id="paper" aria-label="Paper">
 <button>Send</button> <button disabled>Later</button>
</form><p id="sent" role="status"></p>
<table><caption>Prices</caption><tr><th>Thing</th><th>Price</th></tr><tr><td>Pear</td><td>3</td></tr></table>
<button onclick="alert('Careful!')">Warn</button>
<button onclick="answer.textContent = confirm('Sure?') + ' ' + prompt('How many?', '7')">Ask</button>
<p id="answer" role="status"></p>
<iframe src="/frame" title="Ad"></iframe>
<a href="/file">Get the list</a>
<button onclick="console.log('said', 42); setTimeout(() => { throw new Error('broken') })">Talk</button>
<button onclick="fetch('/slow').then(r => r.text()).then(t => late.textContent = t)">Load</button>
<p id="late" role="status"></p>
<button onclick="location.hash = 'x'; while (true) {}">Hang</button>
<div style="height: 4000px"></div><img src="/dot.svg" alt="A dot" width="9">"""

PAGES = {
    "/": SHOP,
    "/next": "<title>Second</title><h1>Second page</h1><a href='/third'>On</a>",
    "/third": "<title>Third</title><h1>Third page</h1>",
    "/popup": "<title>Help</title><h1>How to order</h1><button onclick='window.close()'>Close</button>",
    "/frame": "<button onclick=\"this.textContent = 'Clicked in frame'\">In the frame</button>",
    "/leave": "<title>Leave</title><input oninput=\"onbeforeunload = e => e.preventDefault()\"><a href='/next'>Go</a>",
    "/long": "<title>Long</title>" + "".join(f"<p>Line {n} <a href='/next'>link {n}</a></p>" for n in range(2000)),
    "/noisy": "<title>Noisy</title><script>for (let i = 0; i < 20000; i++) console.log(i)</script>done",
    "/windows": "<title>W</title><button onclick=\"for (let i = 0; i < 15; i++) window.open('/third')\">Many</button>",
}


class Site:
    """An HTTP server; `hits` are the paths asked for."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        self.hits: list[str] = []
        self.port = 0

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    def url(self, path: str = "/") -> str:
        return f"http://{self.host}:{self.port}{path}"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.hits.append(path)
        if path in PAGES:
            return web.Response(text=PAGES[path], content_type="text/html")
        if path == "/file":
            name = request.query.get("name", "price list.csv")
            head = {"Content-Disposition": f'attachment; filename="{name}"'}
            return web.Response(body=b"thing,price\npear,3\n" * int(request.query.get("times", 1)), headers=head)
        if path == "/slow":
            await asyncio.sleep(0.6)
            return web.Response(text="Loaded late")
        if path == "/never":
            await asyncio.sleep(3600)
        if path == "/dot.svg":
            return web.Response(
                text='<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><circle r="4"/></svg>',
                content_type="image/svg+xml",
            )
        if path == "/redirect":
            raise web.HTTPFound(request.query["to"])
        return web.Response(status=404, text="<title>Nothing</title>Nothing here", content_type="text/html")
