#include "fork.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <vector>

namespace kvquota {

struct ForkRegistry {
  std::mutex mutex;
  std::array<std::vector<ForkAware*>, 3> objects;

  // Never destroyed: a fork or a late destructor may come after static destruction.
  static ForkRegistry& instance() {
    static ForkRegistry* registry = [] {
      pthread_atfork([] { instance().before(); }, [] { instance().in_parent(); },
                     [] { instance().in_child(); });
      return new ForkRegistry;
    }();
    return *registry;
  }

  std::vector<ForkAware*>& group_of(const ForkAware* object) {
    return objects.at(static_cast<size_t>(object->order_));
  }

  void before() {
    mutex.lock();
    for (auto& group : objects) {
      for (ForkAware* object : group) object->before_fork();
    }
  }

  void in_parent() {
    for (auto group = objects.rbegin(); group != objects.rend(); ++group) {
      for (ForkAware* object : *group) object->after_fork_in_parent();
    }
    mutex.unlock();
  }

  void in_child() {
    for (auto group = objects.rbegin(); group != objects.rend(); ++group) {
      for (ForkAware* object : *group) object->after_fork_in_child();
    }
    mutex.unlock();
  }
};

void ForkAware::enlist() {
  ForkRegistry& registry = ForkRegistry::instance();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  registry.group_of(this).push_back(this);
}

void ForkAware::delist() {
  ForkRegistry& registry = ForkRegistry::instance();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  auto& group = registry.group_of(this);
  group.erase(std::remove(group.begin(), group.end(), this), group.end());
}

}  // namespace kvquota
