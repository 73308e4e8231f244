"""One call for each line of standard input, one answer for each on standard output, both JSON objects.

What the official clients have in common stands here: how an exception is told, and how long they say that they wait. Left
out on purpose: every judgement, which is made by the tests that start these scripts.
"""

import json
import logging
import sys
import time


class Waits(logging.Handler):
    """The waits before retries, as the clients log them."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.seconds = []

    def emit(self, record):
        if str(record.msg).startswith("Retrying request"):
            self.seconds += [argument for argument in record.args if isinstance(argument, float)]


def serve(package, call):
    """Answers until the input ends. `call` takes a line's object and gives the text and the usage."""
    waits = Waits()
    logger = logging.getLogger(package.__name__)
    logger.setLevel(logging.INFO)
    logger.addHandler(waits)
    logger.propagate = False
    for line in sys.stdin:
        waits.seconds = []
        start = time.monotonic()
        try:
            text, usage = call(json.loads(line))
            answer = {"text": text, "usage": usage}
        except Exception as error:
            answer = told(error)
        answer["waits"] = waits.seconds
        answer["took"] = time.monotonic() - start
        print(json.dumps(answer), flush=True)


def told(error):
    response = getattr(error, "response", None)
    return {
        # With the classes that a program would catch it by; a connection's end in a stream is one of the HTTP library's.
        "exceptions": [kind.__name__ for kind in type(error).__mro__],
        "status": getattr(error, "status_code", None),
        "message": str(error),
        "type": getattr(error, "type", None),
        "code": getattr(error, "code", None),
        "body": getattr(error, "body", None),
        "retry_after": response.headers.get("retry-after") if response is not None else None,
    }
