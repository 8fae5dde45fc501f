"""The thread that makes the pages that browsers ask for at the endpoint. The core answers HTTP, and never waits."""

from __future__ import annotations

import logging

from elastic_rs._elastic_rs import EndpointServer, PageRequest, PageRequests

logger = logging.getLogger("elastic_rs.observe")


def serve_pages(host: EndpointServer) -> None:
    """Make the host's pages from now on, until it ends. Costs a thread that waits, unless nobody may read pages."""
    requests = host.page_requests()
    if requests is None:
        return
    from elastic_rs._threads import start_daemon

    try:
        start_daemon(lambda: _serve(requests), "elastic_rs-page")
    except RuntimeError as error:
        logger.warning("the page of the job is not served: %s", error)


def _serve(requests: PageRequests) -> None:
    warned = False
    while (request := _next(requests)) is not None:
        try:
            request.made(_made(request))
        except Exception:  # noqa: BLE001 - logged with its traceback
            # Whatever is wrong with a page, the job goes on. A browser asks every few seconds.
            (logger.debug if warned else logger.warning)("the page of the job could not be made", exc_info=True)
            warned = True


def _next(requests: PageRequests) -> PageRequest | None:
    try:
        return requests.next()
    except RuntimeError:  # the interpreter ends
        return None


def _made(request: PageRequest) -> str:
    # Not before somebody wants to see a page.
    import json

    from elastic_rs._observe._events import parse
    from elastic_rs._observe._page import Served, listing, page

    if request.runs is not None:
        names, more = request.runs
        return listing(names, more, still=request.still)
    assert request.run is not None
    lines, state = request.run
    return page(parse(lines), json.loads(state), served=Served(still=request.still, named=request.named))
