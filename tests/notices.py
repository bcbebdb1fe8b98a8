"""Waiting for the notices of samplewise.core.text without sleeping."""

import threading


def wait_for_notices():
    """Return when each notice that is due has been printed: its timer thread has ended."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
