"""ARC and Fate's variant of it, each written anew line by line, for tests to compare with."""

from __future__ import annotations


class ReferenceArc:
    """Figure 4 of the paper, line by line: lists with the most recent first, and no other structure."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def replace(self, x: int) -> None:
        if len(self.t1) >= 1 and ((x in self.b2 and len(self.t1) == self.p) or len(self.t1) > self.p):
            self.b1.insert(0, self.t1.pop())
        else:
            self.b2.insert(0, self.t2.pop())

    def request(self, x: int) -> bool:
        c = self.c
        if x in self.t1 or x in self.t2:  # case I
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.insert(0, x)
            return True
        if x in self.b1:  # case II
            delta = 1.0 if len(self.b1) >= len(self.b2) else len(self.b2) / len(self.b1)
            self.p = min(self.p + delta, c)
            self.replace(x)
            self.b1.remove(x)
            self.t2.insert(0, x)
            return False
        if x in self.b2:  # case III
            delta = 1.0 if len(self.b2) >= len(self.b1) else len(self.b1) / len(self.b2)
            self.p = max(self.p - delta, 0)
            self.replace(x)
            self.b2.remove(x)
            self.t2.insert(0, x)
            return False
        l1, l2 = len(self.t1) + len(self.b1), len(self.t2) + len(self.b2)  # case IV
        if l1 == c:
            if len(self.t1) < c:
                self.b1.pop()
                self.replace(x)
            else:
                self.t1.pop()
        elif l1 + l2 >= c:
            if l1 + l2 == 2 * c:
                self.b2.pop()
            self.replace(x)
        self.t1.insert(0, x)
        return False


class ReferenceFate(ReferenceArc):
    """The rule of Fate's released code, line by line."""

    def replace(self, x: int) -> None:
        if (len(self.t1) > 0 and len(self.t1) > self.p) or not self.t2:
            self.b1.insert(0, self.t1.pop())
        else:
            self.b2.insert(0, self.t2.pop())

    def request(self, x: int) -> bool:
        size = self.c
        hit = x in self.t1 + self.t2
        if hit:
            (self.t1 if x in self.t1 else self.t2).remove(x)
        elif x in self.b1:
            self.p = min(size, self.p + len(self.t1))
            self.replace(x)
            self.b1.remove(x)
        elif x in self.b2:
            self.p = max(0, self.p - len(self.t2))
            self.replace(x)
            self.b2.remove(x)
        else:
            n_once = len(self.t1) + len(self.b1)
            n_all = n_once + len(self.t2) + len(self.b2)
            if n_once == size and len(self.t1) < size:
                self.b1.pop()
                self.replace(x)
            elif n_once == size:
                self.t1.pop()
            elif n_all >= size:
                if n_all == 2 * size:
                    (self.b1 or self.b2).pop()
                self.replace(x)
            self.t1.insert(0, x)
            return False
        self.t2.insert(0, x)
        return hit
