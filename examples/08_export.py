"""Train, export the best model as one file, and serve it to others over HTTP.

    pip install 'flaxfit[export]'
    python examples/08_export.py

The file runs without the model's code: the ten lines of `serve` know nothing of the network.
"""

import http.server
import json
import tempfile
import threading
import urllib.request

import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import flaxfit as ff


class CNN(nn.Module):
    """A convolution, BatchNorm and dropout: the last two differ between training and use."""

    @nn.compact
    def __call__(self, images, train: bool):
        x = nn.Conv(16, (3, 3))(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2)).reshape(x.shape[0], -1)
        x = nn.Dropout(0.3, deterministic=not train)(x)
        return nn.Dense(10)(x)


def train(path):
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1) / 16
    x, x_test, y, y_test = train_test_split(images, labels, test_size=357, random_state=0)
    model = ff.Model(CNN(), optax.adam(5e-3), "crossentropy", metrics=["accuracy"])
    best = ff.callbacks.Export(path, monitor="val_accuracy")
    model.fit(x, y, epochs=5, validation_data=(x_test, y_test), callbacks=[best])
    return x_test, y_test


def serve(path, port=0):
    model = ff.export.load(path)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            x = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps(np.asarray(model(x)).tolist()).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

    return http.server.HTTPServer(("127.0.0.1", port), Handler)


def ask(port, images):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}", data=json.dumps(images.tolist()).encode()
    )
    with urllib.request.urlopen(request) as answer:
        return np.array(json.load(answer))


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/digits.stablehlo"
        x_test, y_test = train(path)
        server = serve(path)
        print(ff.export.load(path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    predicted = ask(server.server_port, x_test).argmax(-1)
    server.shutdown()
    server.server_close()
    print(f"test accuracy {(predicted == y_test).mean():.4f}")


if __name__ == "__main__":
    main()
