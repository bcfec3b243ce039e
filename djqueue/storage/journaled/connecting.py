"""Connect to the scheduler, and say why that failed."""

import logging
import socket

from djqueue.core.breaker import CircuitBreaker
from djqueue.core.deadline import remaining
from djqueue.core.errors import ConfigurationError, StorageUnavailableError
from djqueue.core.throttle import ThrottledLog

from .address import Address
from .framing import CONNECT_TIMEOUT, connect
from .probing import NoSchedulerError

logger = logging.getLogger("djqueue.remote")
unsafe = ThrottledLog(logger, 60.0)


def connect_to(address: Address | None, breaker: CircuitBreaker) -> socket.socket:
    """Return a socket that is connected to the scheduler.

    Raises NoSchedulerError if none is there, and another StorageUnavailableError if it does not respond.
    """
    if address is None:
        raise NoSchedulerError("no scheduler is running for this database: start manage.py runworkers")
    try:
        return connect(address, remaining(CONNECT_TIMEOUT))
    except ConfigurationError as error:
        # Enqueues use the tables meanwhile; this line is the only sign of why the scheduler is not used.
        unsafe.log(
            logging.WARNING,
            str(address),
            "Not using the scheduler's socket, because it is not private: %s",
            error,
        )
        raise NoSchedulerError(str(error)) from error
    except OSError as error:
        reason = (
            f"the scheduler cannot be reached at {address}: {error}; is it on another machine, or in a "
            "systemd unit with PrivateTmp=yes? Then give it a socket in its RuntimeDirectory=, or a "
            "tcp:// ADDRESS and a TOKEN, in DJQUEUE['STORAGE']['OPTIONS']"
        )
        if isinstance(error, TimeoutError | BlockingIOError):
            # Nothing accepts connections at this address; a scheduler that refuses them responds.
            breaker.failed(reason)
            raise StorageUnavailableError(reason) from error
        raise NoSchedulerError(reason) from error
