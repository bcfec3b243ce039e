"""Jobs, and what belongs to them."""

from functools import partialmethod
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.contrib.admin.utils import unquote
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.loader import render_to_string
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from djqueue.conf import MSGPACK
from djqueue.core.states import State
from djqueue.models import DeadLetter, Job, JobAttempt, JobLog, JobResult

from . import actions, rendering
from .base import StoredAdmin
from .filters import NameFilter, QueueFilter
