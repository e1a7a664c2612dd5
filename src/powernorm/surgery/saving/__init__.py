"""Models with norms of this library as files, and back.

| file | what it does |
|---|---|
| `records.py` | records this library's changes of a model, and applies them to another |
| `storage.py` | writes and reads the folder: `powernorm.safetensors` and `config.json` |
| `loading.py` | turns a model of the original architecture into the saved one |
| `stock.py` | gives the weights of the original architecture that compute the same |

`powernorm.save` and `powernorm.load` are in `powernorm.integrations.saved_models`.
"""
