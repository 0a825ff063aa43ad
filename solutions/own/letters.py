"""Learn to write Python, one character after the other, from a source file of Python itself."""

import argparse
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Writer(nn.Module):
    """A recurrent network that guesses the next character at each place of a text."""

    def __init__(self, characters, width):
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, text):
        outputs, _ = self.lstm(self.embedding(text))
        return self.head(outputs)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--length", type=int, default=64, help="characters of a text")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is too small for more
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = Path(argparse.__file__).read_text("utf-8")
    characters = sorted(set(source))
    codes = torch.tensor([characters.index(character) for character in source])
    texts = codes.split(args.length + 1)[:-1]
    data = TensorDataset(torch.stack(texts))
    loader = DataLoader(data, args.batch_size, shuffle=True, drop_last=True)
    model = Writer(len(characters), args.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = chain.from_iterable(repeat(loader))
    for (text,) in islice(batches, args.steps):
        text = text.to(device)
        guesses = model(text[:, :-1])
        loss = nn.functional.cross_entropy(guesses.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
