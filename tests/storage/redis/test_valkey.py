"""The Redis storage on Valkey, where that is installed. All tests of Redis can be had on it:
see `DJQUEUE_TEST_REDIS_SERVER`."""

import shutil
from contextlib import closing

import pytest

from djqueue.storage.redis import RedisStorage, scripts
from djqueue.testing import contract
from tests import servers

from .cases import OnRedis

PROGRAM = shutil.which("valkey-server")

if PROGRAM is None:
    pytest.skip("valkey-server is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def valkey_server():
    with servers.RedisServer(program=PROGRAM) as server:
        yield server


@pytest.fixture
def valkey_options(valkey_server):
    valkey_server.clean()
    return valkey_server.options


@pytest.mark.thorough
class TestValkey(OnRedis, contract.StorageContract):
    @pytest.fixture
    def options(self, valkey_options):
        return valkey_options


def test_valkey_compiles_every_script(valkey_server):
    loaded = {name: valkey_server.run("SCRIPT", "LOAD", scripts.script(name).text) for name in scripts.NAMES}

    assert loaded == {name: scripts.script(name).sha.decode() for name in scripts.NAMES}


def test_valkey_is_recognized_and_new_enough(valkey_options, valkey_server):
    with valkey_server.client() as client:
        assert "valkey_version" in client.info("server")
    with closing(RedisStorage(**valkey_options)) as storage:
        storage.connect()

        assert [finding.id for finding in storage.reads.findings()] == ["djqueue.W009"]
