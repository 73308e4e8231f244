//! The policy gates (`org_status`, `model_policy`): what the view of the policy store means.

use super::{Allow, Evaluation};
use crate::class::{Code, Dependency};
use crate::policy::{Lookup, OrgStatus, PolicyView};
use crate::rules::{Gate, GateRule};

impl Evaluation<'_> {
    pub(super) fn org_status(&mut self, rule: &GateRule, allow: &mut Allow<'_>) {
        let status = match self.view.as_ref().map(|view| &view.org) {
            Some(Lookup::Known(org)) => Some(org.as_ref().map(|org| org.status)),
            _ => None,
        };
        match status {
            Some(Some(OrgStatus::Active)) => {}
            Some(Some(OrgStatus::Suspended)) => self.deny(Code::OrgSuspended, Gate::OrgStatus),
            Some(Some(OrgStatus::ReadOnly)) => self.deny(Code::OrgReadOnly, Gate::OrgStatus),
            Some(None) => self.deny(Code::OrgUnknown, Gate::OrgStatus),
            None => self.bypass_or_close(Dependency::Policy, rule, allow),
        }
        self.cursor = self.cursor.saturating_add(1);
    }

    pub(super) fn model_policy(&mut self, rule: &GateRule, allow: &mut Allow<'_>) {
        self.cursor = self.cursor.saturating_add(1);
        let Some(model) = self.request.subject.model.as_deref() else {
            return self.deny(Code::ModelRequired, Gate::ModelPolicy);
        };
        let view = self.view.as_ref().unwrap_or(&PolicyView::UNAVAILABLE);
        match &view.org {
            Lookup::Known(None) => return self.deny(Code::OrgUnknown, Gate::ModelPolicy),
            Lookup::Known(Some(org)) if !org.allows(model) => {
                return self.deny(Code::ModelNotAllowed, Gate::ModelPolicy);
            }
            Lookup::Known(Some(_)) => {}
            Lookup::Unavailable => return self.bypass_or_close(Dependency::Policy, rule, allow),
        }
        match &view.provider {
            Lookup::Known(Some(_)) => {}
            Lookup::Known(None) => self.deny(Code::ProviderNotConfigured, Gate::ModelPolicy),
            // An unreadable registry is an outage, never "not configured".
            Lookup::Unavailable => self.bypass_or_close(Dependency::Policy, rule, allow),
        }
    }
}
