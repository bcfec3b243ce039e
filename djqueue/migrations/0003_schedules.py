import datetime
import djqueue.fields
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('djqueue', '0002_outboxjob'),
    ]

    operations = [
        migrations.AlterModelOptions(
            name='cronjob',
            options={'permissions': (('run_cronjob', 'Can run cron job now'),), 'verbose_name': 'cron job', 'verbose_name_plural': 'cron jobs'},
        ),
        migrations.AddField(
            model_name='cronjob',
            name='blackouts',
            field=models.TextField(blank=True, default='', help_text='One a line, in the time zone above: 2026-12-24, 2026-12-24..2027-01-02, 12-25, sat,sun, 22:00-06:00, mon-fri 09:00-17:00.', verbose_name='blackouts'),
        ),
        migrations.AddField(
            model_name='cronjob',
            name='end_at',
            field=djqueue.fields.MillisecondsField(blank=True, help_text='No run is later.', null=True, verbose_name='end'),
        ),
        migrations.AddField(
            model_name='cronjob',
            name='every',
            field=models.DurationField(blank=True, help_text='As 1:30:00. Counted from the start, or from 1970 on.', null=True, verbose_name='interval'),
        ),
        migrations.AddField(
            model_name='cronjob',
            name='firing_at',
            field=djqueue.fields.MillisecondsField(blank=True, editable=False, help_text='Since when somebody is at the run that is due; empty: nobody has begun with it.', null=True),
        ),
        migrations.AddField(
            model_name='cronjob',
            name='jitter',
            field=models.DurationField(blank=True, default=datetime.timedelta, help_text='Each run comes later by a part of this, which its name and time decide.', verbose_name='jitter'),
        ),
        migrations.AddField(
            model_name='cronjob',
            name='max_executions',
            field=models.PositiveIntegerField(blank=True, help_text='It is over after so many.', null=True, verbose_name='most executions'),
        ),
        migrations.AddField(
            model_name='cronjob',
            name='missed',
            field=models.CharField(choices=[('skip', 'leave them out'), ('one', 'enqueue one job for all of them'), ('all', 'enqueue one job for each within the window')], default='one', max_length=16, verbose_name='missed runs'),
        ),
        migrations.AddField(
            model_name='cronjob',
            name='missed_window',
            field=models.DurationField(default=datetime.timedelta(days=1), help_text='How old a missed run may be to be made up for.', verbose_name='window'),
        ),
        migrations.AddField(
            model_name='cronjob',
            name='on_blackout',
            field=models.CharField(choices=[('skip', 'leave it out'), ('put_off', 'put it off to the end of the blackout')], default='skip', max_length=16, verbose_name='runs in a blackout'),
        ),
        migrations.AddField(
            model_name='cronjob',
            name='overlap',
            field=models.CharField(choices=[('allow', 'enqueue another one'), ('skip', 'leave the slot out'), ('one_pending', 'enqueue another one unless one waits already')], default='allow', max_length=16, verbose_name='while a job is unfinished'),
        ),
        migrations.AddField(
            model_name='cronjob',
            name='source',
            field=models.CharField(choices=[('hand', 'made here'), ('code', 'declared in code'), ('withdrawn', 'no longer declared in code')], default='hand', editable=False, max_length=16, verbose_name='source'),
        ),
        migrations.AddField(
            model_name='cronjob',
            name='start_at',
            field=djqueue.fields.MillisecondsField(blank=True, help_text='No run is earlier.', null=True, verbose_name='start'),
        ),
        migrations.AddField(
            model_name='cronjob',
            name='unfinished',
            field=models.JSONField(blank=True, default=list, editable=False, help_text='Queue and id of its jobs that had not ended at its last run, if runs may not overlap.'),
        ),
        migrations.AlterField(
            model_name='cronjob',
            name='queue',
            field=models.CharField(blank=True, default='', help_text="Empty: the job's own.", max_length=255, verbose_name='queue'),
        ),
        migrations.AlterField(
            model_name='cronjob',
            name='schedule',
            field=models.CharField(blank=True, default='', help_text='Five or six cron fields, or @hourly and the like; or give an interval.', max_length=200, verbose_name='schedule'),
        ),
        migrations.AddIndex(
            model_name='cronjob',
            index=models.Index(condition=models.Q(('enabled', True)), fields=['next_run_at'], name='djqueue_cron_due'),
        ),
        migrations.AddConstraint(
            model_name='cronjob',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(models.Q(('schedule', ''), _negated=True), ('every__isnull', True)), models.Q(('every__gt', datetime.timedelta(0)), ('schedule', '')), _connector='OR'), name='djqueue_cron_one_form', violation_error_message='Give a cron line or an interval.'),
        ),
        migrations.AddConstraint(
            model_name='cronjob',
            constraint=models.CheckConstraint(condition=models.Q(('start_at__isnull', True), ('end_at__isnull', True), ('end_at__gt', models.F('start_at')), _connector='OR'), name='djqueue_cron_ends_later', violation_error_message='The end is not later than the start.'),
        ),
        migrations.AddConstraint(
            model_name='cronjob',
            constraint=models.CheckConstraint(condition=models.Q(('jitter__gte', datetime.timedelta(0))), name='djqueue_cron_jitter', violation_error_message='The jitter is negative.'),
        ),
    ]
