"""procrastinate on PostgreSQL."""

from mark import POSTGRES, mark, payloads
from procrastinate import App, PsycopgConnector, SyncPsycopgConnector

app = App(connector=PsycopgConnector(conninfo=POSTGRES))


@app.task(name="touch")
async def touch(n, user, text):
    mark()
    return {"ok": True}


def fill():
    entries = payloads()
    with app.replace_connector(SyncPsycopgConnector(conninfo=POSTGRES)) as producer, producer.open():
        producer.schema_manager.apply_schema()
        for start in range(0, len(entries), 1_000):
            producer.tasks["touch"].batch_defer(*entries[start : start + 1_000])


if __name__ == "__main__":
    fill()
