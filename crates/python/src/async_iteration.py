"""Asynchronous iteration: each step of an iterator runs in a thread of asyncio's pool."""

import asyncio

END = object()


async def step(iterator):
    item = await asyncio.to_thread(next, iterator, END)
    if item is END:
        raise StopAsyncIteration
    return item
