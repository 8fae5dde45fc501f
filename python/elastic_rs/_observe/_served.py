"""The thread that makes the pages that browsers ask for at the endpoint. The core answers HTTP, and never waits."""

from __future__ import annotations

import logging

from elastic_rs._elastic_rs import Host, PageOrder, PageOrders

logger = logging.getLogger("elastic_rs.observe")


def serve_pages(host: Host) -> None:
    """Make the host's pages from now on, until it ends. Costs a thread that waits, unless nobody may read pages."""
    orders = host.page_orders()
    if orders is None:
        return
    from elastic_rs._threads import start_daemon

    try:
        start_daemon(lambda: _serve(orders), "elastic_rs-page")
    except RuntimeError as error:
        logger.warning("the page of the job is not served: %s", error)


def _serve(orders: PageOrders) -> None:
    told = False
    while (order := _next(orders)) is not None:
        try:
            order.made(_made(order))
        except Exception:  # noqa: BLE001 - logged with its traceback
            # Whatever is wrong with a page, the job goes on. A browser asks every few seconds.
            (logger.debug if told else logger.warning)("the page could not be made", exc_info=True)
            told = True


def _next(orders: PageOrders) -> PageOrder | None:
    try:
        return orders.next()
    except RuntimeError:  # the interpreter ends
        return None


def _made(order: PageOrder) -> str:
    # Not before somebody wants to see a page.
    import json

    from elastic_rs._observe._events import parse
    from elastic_rs._observe._page import Served, listing, page

    if order.runs is not None:
        names, more = order.runs
        return listing(names, more, still=order.still)
    assert order.run is not None
    lines, state = order.run
    return page(parse(lines), json.loads(state), served=Served(still=order.still, named=order.named))
