"""huey on Redis."""

from huey import RedisHuey
from mark import REDIS, mark, payloads

huey = RedisHuey("bench", url=REDIS)


@huey.task()
def touch(n, user, text):
    mark()
    return {"ok": True}


if __name__ == "__main__":
    import huey_app  # a task is stored with the name of its module

    for payload in payloads():
        huey_app.touch(**payload)
