"""A program that waits for ever before it trains."""

import sys
import threading

sys.stdout.write("waiting for a licence\n")
sys.stdout.flush()
threading.Event().wait()
