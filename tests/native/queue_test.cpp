// The page queue without Python, to be run under sanitizers: random operations, and a model beside it.
#include <algorithm>
#include <cstdio>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "page_queue.h"

using namespace kvquota;

namespace {

constexpr int32_t kPages = 150;  // more than two words of a bit for each
constexpr int32_t kBlocks = 7;   // a page, and one more that straddles

template <typename Call>
void refused(Call call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return;
  }
  CHECK(false);
}

std::vector<PageQueue::Range> ranges() {
  std::vector<PageQueue::Range> pages;
  for (int32_t page = 0; page < kPages; ++page) {
    const int32_t first = page * (kBlocks + 1);
    // One page has no block that lies wholly in it.
    pages.push_back({first, page == 70 ? first : first + kBlocks});
  }
  return pages;
}

void random_operations(unsigned seed) {
  std::mt19937 random(seed);
  PageQueue queue(kPages * (kBlocks + 1), ranges());
  std::set<int32_t> used;
  std::set<int32_t> taken;
  const auto some_used = [&] {
    std::vector<int32_t> some;
    for (const int32_t block : used) {
      if (random() % 4 == 0) some.push_back(block);
    }
    return some;
  };
  for (int turn = 0; turn < 4000; ++turn) {
    switch (random() % 11) {
      case 0:
        queue.allow(random() % 8);
        break;
      case 1:
      case 2: {
        queue.for_running = random() % 2 == 0;
        const int64_t free = queue.num_free();
        queue.pop(random() % (std::min<int64_t>(free, 40) + 1), [&](int32_t block) {
          CHECK(block % (kBlocks + 1) != kBlocks && used.insert(block).second);
          CHECK(queue.in_circulation(block / (kBlocks + 1)));
        });
        queue.for_running = false;
        break;
      }
      case 3:
      case 4: {
        const std::vector<int32_t> some = some_used();
        queue.free(some.data(), some.size(), random() % 2 == 0);
        for (const int32_t block : some) used.erase(block);
        if (!some.empty()) refused([&] { queue.free(some.data(), 1, true); });
        break;
      }
      case 5:
        for (const int32_t page : queue.victims(random() % 6)) {
          queue.take(page);
          CHECK(taken.insert(page).second);
          refused([&] { queue.take(page); });
        }
        break;
      case 6:
        if (!taken.empty()) {
          queue.give(*taken.begin());
          refused([&] { queue.give(*taken.begin()); });
          taken.erase(taken.begin());
        }
        break;
      case 7:
        queue.drain(random() % 10, {0, 3});
        break;
      case 8: {
        // A hit: the first free blocks, by the order in which they would be handed out.
        const int32_t block = queue.after(-1);
        if (block >= 0) {
          CHECK(used.insert(block).second);
          queue.remove(block);
          refused([&] { queue.remove(block); });
        }
        break;
      }
      case 9:
        queue.uncache_all();
        CHECK(queue.num_uncached() == queue.num_free());
        break;
      default:
        queue.grown();
        refused([&] { queue.take(kPages); });
        refused([&] { queue.put(-1); });
        break;
    }
    queue.check();
    CHECK(queue.num_used() == static_cast<int64_t>(used.size()));
    const PageQueue::Usage usage = queue.usage();
    CHECK(usage.draining <= usage.pinned && usage.pinned + usage.evictable + usage.empty <= kPages);
  }
  CHECK(!used.empty());
}

}  // namespace

int main() {
  for (unsigned seed = 1; seed <= 3; ++seed) random_operations(seed);
  std::puts("passed");
}
