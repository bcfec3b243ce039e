"""The app of the Spark connector: its tables, and the command `djqueue_spark`."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class SparkConfig(AppConfig):
    """`"djqueue.contrib.spark"` in INSTALLED_APPS, next to `"djqueue"`. Does not need pyspark."""

    name = "djqueue.contrib.spark"
    label = "djqueue_spark"
    verbose_name = _("Job queue: Spark")
    default_auto_field = "django.db.models.BigAutoField"
