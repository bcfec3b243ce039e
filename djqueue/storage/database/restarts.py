"""Notice that the machine of a SQLite database was restarted.

Leases and rates on SQLite are by the time since the machine started, which no change of its clock affects. So
what was written before a restart means nothing after it.
"""

from djqueue.storage.tables.holders import boot_of, host_name

from .transaction import Tx

NAME = "boot"
"""Name of the row of the leases that names the boot in which this database was last used."""


def is_first_use(tx: Tx) -> bool:
    """Return whether no process has used the database since the machine was started."""
    host = tx.value("SELECT host FROM djqueue_scheduler_lease WHERE name = ?", NAME)
    return host is None or boot_of(host) != boot_of()


def follow(tx: Tx) -> None:
    """Expire the leases of before the restart, whose processes have ended, and fill all rate limits up."""
    if not is_first_use(tx):
        return  # Another process has done so since.
    tx.run("UPDATE djqueue_claim SET lease_until = 0")
    tx.run("UPDATE djqueue_rate_bucket SET full_at = 0, turns = ''")
    tx.run("UPDATE djqueue_rate_bucket SET rest_at = 0 WHERE rest_at IS NOT NULL")
    tx.run(
        "INSERT INTO djqueue_scheduler_lease (name, holder, host, pid, address, generation, renewed_at, "
        "expires_at) VALUES (?, '', ?, 0, '', 0, ?, 0) ON CONFLICT (name) DO UPDATE SET "
        "host = excluded.host, renewed_at = excluded.renewed_at",
        *(NAME, host_name(), tx.now),
    )
