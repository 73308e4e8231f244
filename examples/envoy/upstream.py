#!/usr/bin/env python3
"""A stand-in for the upstream: counts the requests that reach it and shows what is left of the envelope.

Every request is answered 200 with {"hit": N, "envelope": [names of x-admission- headers that came through]}. One with
"messages" gets the "usage" of a chat completion as well: a token for four bytes of the body, and five for the answer.
`GET /-/hits`, asked directly, tells the count without adding to it. It is no load target: one thread per connection.
"""

import argparse
import http.server
import json
import threading


class Upstream(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections alive, as a provider does
    counting = threading.Lock()
    hits = 0

    def answer(self):
        body = self.read_body()
        if self.path == "/-/hits":
            reply = {"hits": Upstream.hits}
        else:
            with Upstream.counting:
                Upstream.hits += 1
                number = Upstream.hits
            envelope = sorted(name.lower() for name in self.headers if name.lower().startswith("x-admission-"))
            reply = {"hit": number, "envelope": envelope, **self.usage(body)}
        body = (json.dumps(reply) + "\n").encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def read_body(self):
        """A body left unread would be taken for the next request on the connection."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size + 2)[:size]
            while self.rfile.readline().strip():
                pass
            return body
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    @staticmethod
    def usage(body):
        try:
            asked = json.loads(body)
            said = min(5, asked.get("max_tokens", 5)) if "messages" in asked else None
        except (ValueError, AttributeError, TypeError):
            return {}
        if said is None:
            return {}
        return {"usage": {"prompt_tokens": len(body) // 4, "completion_tokens": said}}

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = answer

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # the default of 5 refuses a burst
    daemon_threads = True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An upstream that counts its requests.")
    parser.add_argument("--port", type=int, default=9000)
    port = parser.parse_args().port
    print(f"counting on http://127.0.0.1:{port}, tells at /-/hits", flush=True)
    try:
        Server(("127.0.0.1", port), Upstream).serve_forever()
    except KeyboardInterrupt:
        pass
