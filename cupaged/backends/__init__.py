"""Where operations run. `open_backend` chooses one; `base.Backend` says what each operation means."""
