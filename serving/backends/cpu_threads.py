"""Threads and streams of a model instance: by default all instances together have one thread per core of this server.

The server copies this file into each backend's folder; like model.py there it imports nothing of this project but what lies
beside it there.
"""

from control_groups import threads_each


def threads_of(config, settings, key):
    """`settings[key]` where given (and not 0), else the cores of this process divided by the model's instances."""
    instances = sum(group.get("count", 1) for group in config.get("instance_group", ())) or 1
    return int(settings.get(key, 0)) or threads_each(instances)


def streams_of(settings, threads):
    """`settings["streams"]`, the runs that one session computes at the same time: by default 1, with "0" one a thread."""
    return int(settings.get("streams", 1)) or threads
