"""The second half of the tutorial: a search from a notebook. It needs wine.py, which `hpsearch init` writes."""

from hpsearch import Study

study = Study.create("wine.py", name="wine-notebook", n_trials=3, epochs=3, seed=1)
study.run(workers=1)
print(study.best_value, study.best_params)

study.stop()  # from here or any other machine; running trials are saved
study.start()
study.extend("+1")
study.run(workers=1)

table = study.train_finalists(top=2, seeds=2, workers=1)
print(table.winner, study.evaluate_test())
print(study.promote())
