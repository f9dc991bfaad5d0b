"""Tasksets of verifiers 0.4 as producers: `producer.function = "verifiers:NAME"`.

```text
this environment                            the one with verifiers (`producer.python`)
rows.py    data.train from the taskset      guest/streamrl_guest/rows.py      the first call of each task's episode
worker.py  keeps a guest running            guest/streamrl_guest/sessions.py  sessions at the gateway, an episode for each
guests.py  its process, what it says        guest/streamrl_guest/relay.py     verifiers' calls to their session
                                            guest/streamrl_chat.py            a harness that starts no process
```

A guest shares no code with streamrl: its packages conflict with others of a run. It hears a `Spec` and says lines of JSON.
"""
